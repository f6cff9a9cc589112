"""Paged attention on NVIDIA GPUs: which kernel takes which rows of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.ops.cuda import decode_attention
from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import attention_cudnn, attention_deterministic, attention_flash
from octavo.ops.triton.attention_decode import decode
from octavo.ops.triton.attention_leading import decode_leading
from octavo.ops.triton.attention_plans import cut_step
from octavo.ops.triton.attention_prefill import prefill
from octavo.ops.triton.attention_shared import decode_shared


def paged_attention(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Any:
    """As `octavo.ops.paged_attention`; rows of a decode whose `seq_lens` is 0 are zeros."""
    if cache.deterministic:
        return attention_deterministic.paged_attention(q, cache, meta, scale, window, softcap, sinks)
    if cache.interleaved or q.shape[1] % cache.num_kv_heads or q.shape[1] // cache.num_kv_heads > 64:
        return NotImplemented
    q = q.contiguous()
    decodes, requests = meta.num_decodes, meta.seq_lens.shape[0]
    plain = window is None and sinks is None
    by_flash = plain and softcap is None and attention_flash.serves(q, meta)
    if by_flash:
        out = attention_flash.attend(q, cache, meta, scale)
    else:
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    if meta.num_shared is not None and plain and decodes == q.shape[0]:
        decode_shared(q, cache, meta, out, scale, softcap)
        return out
    most = decodes if meta.counts is None else min(requests, q.shape[0])
    if plain and softcap is None and decode_attention.serves(q, cache, q.shape[1], most):
        decode_attention.decode(q, cache, meta, out, most, scale)
    elif meta.counts is not None:
        decode_leading(q, cache, meta, out, most, scale, window, softcap, sinks)
    elif decodes:
        decode(q, cache, meta, out, decodes, scale, window, softcap, sinks)
    if by_flash or requests == decodes or q.shape[0] == decodes:
        return out
    if not (plain and softcap is None and attention_cudnn.serves(q, meta)):
        prefill(q, cache, meta, out, decodes, requests - decodes, q.shape[0] - decodes, scale, window, softcap, sinks)
        return out
    assert meta.query_lens_host is not None and meta.seq_lens_host is not None
    pieces = cut_step(q.shape[1], meta.query_lens_host[decodes:], meta.seq_lens_host[decodes:])
    if decodes == 0 and len(pieces) == 1 and pieces[0].by_cudnn and pieces[0].rows == pieces[0].context:
        return attention_cudnn.attend_prompts(q, cache, meta, 0, requests, 0, pieces[0].rows, scale)  # copies nothing
    first, row = decodes, decodes
    for by_cudnn, count, total, rows, context in pieces:
        if not by_cudnn:
            prefill(q, cache, meta, out, first, count, total, scale)
        elif rows == context:
            out[row : row + total] = attention_cudnn.attend_prompts(q, cache, meta, first, count, row, rows, scale)
        else:
            for i in range(count):
                place = (first + i, row + i * rows)
                attention_cudnn.attend_after_past(q, cache, meta, out, *place, rows, context, scale)
        first, row = first + count, row + total
    return out
