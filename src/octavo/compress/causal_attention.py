"""Attention of calibration passes on a CPU: the server's kernel where attention is plainly causal, else torch's.

torch's kernel computes what causality masks as well, for keys and values repeated for each query head: for 32 sequences
of 512 tokens (9 heads of 64, 3 of keys) it takes 137 ms where this takes 26 (2 cores of a Zen 5 processor).
"""

from __future__ import annotations

import inspect
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from octavo.ops.cpu import library
from octavo.ops.functions import paged_attention, store_kv
from octavo.ops.kv_cache import AttentionMetadata, KVCache

IMPLEMENTATION = "octavo_causal"
_BLOCK = 16  # tokens
_BEYOND_CAUSAL = ("softcap", "s_aux", "position_bias")  # what attention may be given besides a mask


def use_causal_kernel(model: Any) -> None:
    """Let a transformers model on a CPU attend by this, if its class calls `AttentionInterface` for torch's."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    config = model.config.get_text_config()
    source = inspect.getsource(sys.modules[type(model).__module__])
    if config._attn_implementation == "sdpa" and "ALL_ATTENTION_FUNCTIONS" in source and library.unavailable() is None:
        AttentionInterface.register(IMPLEMENTATION, causal_attention)
        AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        config._attn_implementation = IMPLEMENTATION


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """What transformers calls: query [B, Hq, T, D], key and value [B, Hkv, T, D] -> [B, T, Hq, D].

    As with torch's attention no mask means a causal one.
    """
    if not _suits(module, query, key, value, attention_mask, given):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **given)
        return output
    batch, heads, length, width = query.shape
    kv_heads, scaling = key.shape[1], given.get("scaling")
    meta = _metadata(batch, length)
    cache = KVCache.allocate(batch * meta.block_table.shape[1] + 1, _BLOCK, kv_heads, width, query.dtype)
    store_kv(_rows(key), _rows(value), cache, meta)
    scale = width**-0.5 if scaling is None else scaling
    return paged_attention(_rows(query), cache, meta, scale).view(batch, length, heads, width), None


def _suits(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, given: dict[str, Any]
) -> bool:
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    plain = attention_mask is None and causal and all(given.get(name) is None for name in _BEYOND_CAUSAL)
    alike = query.shape[2] == key.shape[2] and query.shape[3] == value.shape[3] and query.shape[2] > 1
    kernel = library.prefers_interleaved(query.device, query.dtype, _BLOCK, query.shape[3])
    return plain and alike and kernel and not (query.requires_grad or key.requires_grad) and not given.get("dropout")


def _rows(values: Tensor) -> Tensor:
    """[B, H, T, D] -> [B * T, H, D], contiguous."""
    return values.transpose(1, 2).flatten(0, 1).contiguous()


@lru_cache(maxsize=4)
def _metadata(batch: int, length: int) -> AttentionMetadata:
    """Sequences of `length` tokens in blocks of their own, one after the other from block 1."""
    blocks = -(-length // _BLOCK)
    table = torch.arange(1, batch * blocks + 1, dtype=torch.int32).view(batch, blocks)
    slots = table[:, :1].long() * _BLOCK + torch.arange(length)
    return AttentionMetadata(
        query_start=torch.arange(batch + 1, dtype=torch.int32) * length,
        seq_lens=torch.full((batch,), length, dtype=torch.int32),
        block_table=table,
        slot_mapping=slots.flatten(),
        max_query_len=length,
        max_seq_len=length,
        num_decodes=0,
        query_lens_host=[length] * batch,
        seq_lens_host=[length] * batch,
    )
