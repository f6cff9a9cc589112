"""Multi-head latent attention (DeepSeek-V2, section 2.1) over pages that hold a token's latent row once.

A row of the cache is the normalized latent [R], which stands for the keys and the values of all heads, then the rotated
key part [P] that all heads share. Queries are taken into the latent space before ("absorbed"), so that attention is
that of one KV head of size R + P whose values are its first R columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.ops import reference
from octavo.ops.dispatch import Candidate, Operation
from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import runtime


def latent_rotary_and_store(
    q: Tensor,
    latent: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    norm: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    """Normalize and rotate a step's latent rows, write them to the cache, and return the rotated queries [T, H, P].

    q [T, H, P]: the part of each head that turns. latent [T, R + P], norm [R]; positions int64 [T]; cos_sin
    [max_pos, P]. `interleaved` pairs channels (2i, 2i + 1) instead of (i, i + P / 2).
    """
    return _STORE(q, latent, positions, cos_sin, cache, meta, norm, eps, interleaved)  # type: ignore[no-any-return]


def latent_attention(q: Tensor, cache: KVCache, meta: AttentionMetadata, scale: float, rank: int) -> Tensor:
    """Causal attention of q [T, H, R + P] over latent rows, the step's own among them: [T, H, R], `rank` being R."""
    return _ATTEND(q, cache, meta, scale, rank)  # type: ignore[no-any-return]


def _store(
    q: Tensor,
    latent: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    norm: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    rank = norm.shape[0]
    cos, sin = cos_sin[positions].chunk(2, dim=1)
    key = reference.rotate(latent[:, None, rank:].float(), cos, sin, interleaved).to(latent.dtype)
    rows = torch.cat((reference.rms_norm(latent[:, :rank], norm, eps)[:, None], key), dim=2)
    reference.store_kv(rows, rows, cache, meta)
    return reference.rotate(q.float(), cos, sin, interleaved).to(q.dtype)


def _attend(q: Tensor, cache: KVCache, meta: AttentionMetadata, scale: float, rank: int) -> Tensor:
    attended = reference.paged_attention(q, cache, meta, scale, None, None, None)
    return attended.unflatten(1, q.shape[1:])[:, :, :rank]


def _operation(name: str, function: Callable[..., Tensor]) -> Operation:
    gpu, types = runtime.lazy("latent", name), (torch.bfloat16, torch.float16, torch.float32)
    note = "caches of rows that stand for keys and values, float8 included; any number of heads"
    return Operation(
        name,
        Candidate("triton", gpu, ("cuda",), types, runtime.unavailable(), note),
        Candidate("torch", function, note="the reference"),
    )


_STORE = _operation("latent_rotary_and_store", _store)
_ATTEND = _operation("latent_attention", _attend)
LATENT_OPERATIONS = (_STORE, _ATTEND)
