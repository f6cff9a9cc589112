"""Operations on a CPU whose rows depend on nothing but themselves, bit by bit, however many there are.

BLAS picks its kernel by the number of rows, so rows are multiplied ROWS at a time, filled up with zeros: one call of
one shape, in which a row's place does not matter (the tests look whether that holds for the BLAS at hand). Attention
takes each query as the decode that it would be. Both are for checking, not for speed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops import reference
from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.packed_weight import QuantizedWeightLike, TorchDense, TorchQuantized

ROWS = 16


def linear_in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] times the transposed weight [N, K], plus bias [N]: [T, N], ROWS rows of x at a time."""
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % ROWS))
    blocks = [F.linear(block.clone(), weight, bias) for block in padded.split(ROWS)] if rows else []
    return torch.cat(blocks)[:rows] if blocks else x.new_empty((0, weight.shape[0]))


def _rejects_device(device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"serves cpu, not {device.type}"


class BlockedDense(TorchDense):
    """A plain weight, multiplied with ROWS rows at a time."""

    name = "torch dense in blocks of rows"

    @staticmethod
    def rejects(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> str | None:
        return TorchDense.rejects(weight, dtype, device) or _rejects_device(device)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_in_blocks(x, weight, bias)


class BlockedQuantized(TorchQuantized):
    """Codes that each product dequantizes, multiplied with ROWS rows at a time."""

    name = "torch dequantize in blocks of rows"

    @staticmethod
    def rejects(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> str | None:
        return TorchQuantized.rejects(weight, dtype, device) or _rejects_device(device)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_in_blocks(x, weight, bias)


def paged_attention(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`reference.paged_attention` with every row of q as a request of its own."""
    rows = q.shape[0]
    counts = meta.query_start.diff()
    owner = torch.repeat_interleave(torch.arange(len(counts), device=q.device), counts)
    behind = meta.query_start[owner + 1] - 1 - torch.arange(rows, device=q.device)  # rows of the request after this one
    alone = replace(
        meta,
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=q.device),
        seq_lens=(meta.seq_lens[owner] - behind).to(torch.int32),
        block_table=meta.block_table[owner],
        num_decodes=rows,
        max_query_len=1,
        query_lens_host=None,
        seq_lens_host=None,
    )
    return reference.paged_attention(q, cache, alone, scale, window, softcap, sinks)
