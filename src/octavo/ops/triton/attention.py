"""Paged attention on NVIDIA GPUs: which kernel takes which rows of a step."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import attention_cudnn, attention_deterministic
from octavo.ops.triton.attention_decode import decode
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
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    decodes, requests = meta.num_decodes, meta.seq_lens.shape[0]
    plain = window is None and sinks is None
    if meta.num_shared is not None and plain and decodes == q.shape[0]:
        decode_shared(q, cache, meta, out, scale, softcap)
        return out
    if decodes:
        decode(q, cache, meta, out, decodes, scale, window, softcap, sinks)
    if requests == decodes or q.shape[0] == decodes:
        return out
    if not (plain and softcap is None and attention_cudnn.serves(q, meta)):
        prefill(q, cache, meta, out, decodes, requests - decodes, q.shape[0] - decodes, scale, window, softcap, sinks)
        return out
    lengths, contexts = meta.query_lens_host, meta.seq_lens_host
    assert lengths is not None and contexts is not None
    # Requests of the same lengths share cuDNN's calls, all that lie between two of those a launch here.
    kinds = groupby(zip(lengths[decodes:], contexts[decodes:], strict=True))
    runs = [(rows, context, len(list(run))) for (rows, context), run in kinds]
    first, row = decodes, decodes
    for is_long, group in groupby(runs, lambda run: attention_cudnn.pays(q.shape[1], *run)):
        members = list(group)
        if is_long:
            for rows, _, count in members:
                attention_cudnn.attend_requests(q, cache, meta, out, first, count, row, scale)
                first, row = first + count, row + rows * count
        else:
            count, total = sum(count for *_, count in members), sum(rows * count for rows, _, count in members)
            prefill(q, cache, meta, out, first, count, total, scale)
            first, row = first + count, row + total
    return out
