"""Paged attention on NVIDIA GPUs: which kernel takes which rows of a step."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import attention_cudnn
from octavo.ops.triton.attention_decode import decode
from octavo.ops.triton.attention_prefill import prefill


def paged_attention(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As `octavo.ops.paged_attention`; rows of a decode whose `seq_lens` is 0 are zeros."""
    if cache.interleaved or q.shape[1] % cache.num_kv_heads or q.shape[1] // cache.num_kv_heads > 64:
        return NotImplemented
    q = q.contiguous()
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    decodes, requests = meta.num_decodes, meta.seq_lens.shape[0]
    if decodes:
        decode(q, cache, meta, out, decodes, scale, window, softcap, sinks)
    if requests == decodes or q.shape[0] == decodes:
        return out
    plain = window is None and softcap is None and sinks is None
    if not (plain and attention_cudnn.serves(q, meta)):
        prefill(q, cache, meta, out, decodes, requests - decodes, q.shape[0] - decodes, scale, window, softcap, sinks)
        return out
    lengths = meta.query_lens_host
    assert lengths is not None
    row = decodes
    for is_long, run in groupby(range(decodes, requests), lambda s: lengths[s] >= attention_cudnn.MIN_ROWS):
        members = list(run)
        rows = sum(lengths[s] for s in members)
        if is_long:
            for s in members:
                attention_cudnn.attend_request(q, cache, meta, out, s, row, scale)
                row += lengths[s]
        else:
            prefill(q, cache, meta, out, members[0], len(members), rows, scale)
            row += rows
    return out
