"""Calls of the compiled kernels with torch tensors; each returns NotImplemented for what its kernel does not cover.

Everything here costs one ctypes call and the allocation of the output: at one row a step makes hundreds of such calls.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from octavo.ops.cpu import library
from octavo.ops.kv_cache import AttentionMetadata, KVCache

TILE_ROWS = 48  # as in attention.cpp: the query heads of a key head must fit in a tile

_LIBRARY: Any = library.load()[0]
# Query rows (times heads a key head) of a work item from which matrix tiles beat vectors; measured.
AMX_FROM = 2 if library.level() >= 3 else 2**31


class _CacheStruct(ctypes.Structure):
    """Mirrors `struct Cache` of common.h."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("num_kv_heads", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
    )


def cache_address(cache: KVCache) -> int:
    """Address of the cache's description for the kernels, made on first use and kept with the cache."""
    if cache.descriptor is None:
        cache.descriptor = _CacheStruct(
            k=cache.k.data_ptr(),
            v=cache.v.data_ptr(),
            num_kv_heads=cache.num_kv_heads,
            block_size=cache.block_size,
            head_dim=cache.head_dim,
        )
    return ctypes.addressof(cache.descriptor)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    if not x.is_contiguous() or weight.dtype is not torch.bfloat16:
        return NotImplemented
    if out is None:
        out = torch.empty_like(x)
    width = x.shape[-1]
    _LIBRARY.octavo_rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not (x.is_contiguous() and residual.is_contiguous() and weight.dtype is residual.dtype is torch.bfloat16):
        return NotImplemented
    out = torch.empty_like(x)
    rows, width = x.shape
    _LIBRARY.octavo_add_rms_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
    return out


def silu_mul(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        return NotImplemented
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty((rows, width))
    _LIBRARY.octavo_silu_mul(x.data_ptr(), out.data_ptr(), rows, width)
    return out


def gelu_tanh_mul(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        return NotImplemented
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty((rows, width))
    _LIBRARY.octavo_gelu_tanh_mul(x.data_ptr(), out.data_ptr(), rows, width)
    return out


def rotary_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool,
) -> Tensor:
    if not (cache.interleaved and qkv.is_contiguous() and cos_sin.dtype is torch.float32 and cos_sin.is_contiguous()):
        return NotImplemented
    rows = qkv.shape[0]
    q = qkv.new_empty((rows, num_heads, head_dim))
    _LIBRARY.octavo_rotary_and_store(
        cache_address(cache),
        qkv.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        meta.slot_mapping.data_ptr(),
        q.data_ptr(),
        rows,
        num_heads,
        cos_sin.shape[1] // 2,
        _address(q_norm),
        _address(k_norm),
        eps,
        interleaved,
    )
    return q


def store_kv(k: Tensor, v: Tensor, cache: KVCache, meta: AttentionMetadata) -> bool:
    head_dim = cache.head_dim
    if not cache.interleaved or k.stride()[1:] != (head_dim, 1) or v.stride()[1:] != (head_dim, 1):
        return NotImplemented
    _LIBRARY.octavo_store_kv(
        cache_address(cache),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        meta.slot_mapping.data_ptr(),
        k.shape[0],
    )
    return True


def paged_attention(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    rows, num_heads, head_dim = q.shape
    if not cache.interleaved or num_heads > TILE_ROWS * cache.num_kv_heads:
        return NotImplemented
    if not q.is_contiguous():
        q = q.contiguous()
    if sinks is not None:
        sinks = sinks.float()
    out = q.new_empty((rows, num_heads * head_dim))
    table = meta.block_table
    _LIBRARY.octavo_paged_attention(
        cache_address(cache),
        q.data_ptr(),
        out.data_ptr(),
        meta.query_start.data_ptr(),
        meta.seq_lens.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        table.shape[0],
        num_heads,
        scale,
        window or 0,
        softcap or 0.0,
        _address(sinks),
        AMX_FROM,
    )
    return out
