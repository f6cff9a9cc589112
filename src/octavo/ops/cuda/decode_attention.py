"""Attention of decodes in `decode_attention.cu`: what it serves, with which sizes, and its launches."""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.cuda import compiler
from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import runtime

MOST_REQUESTS = 1024
_KEYS = 16  # a tile
_LEAST = 4  # tiles that a block takes, where there are any
_SHARED = (227 << 10) - 2 * 17920  # bytes of a multiprocessor on Hopper, less what two blocks declare themselves
_HEAD_DIMS = (64, 128)
_MOST_GROUP = 8  # query heads a key head: columns of a product
_LOG2E = 1.4426950408889634
_POINTERS = "10Q"  # of the kernel's structure


class Shape(NamedTuple):
    """What the kernel is compiled for; `rotary` channels turn, none of them where queries come as they are."""

    head_dim: int
    group: int
    kv_heads: int
    block_size: int
    fused: bool = False
    rotary: int = 0
    interleaved: bool = False
    q_norm: bool = False
    k_norm: bool = False


class Sizes(NamedTuple):
    """Warps that multiply, tiles in the ring (a multiple of those), blocks that share a multiprocessor."""

    warps: int
    stages: int
    resident: int

    def shared_bytes(self, shape: Shape) -> int:
        """Of a block, as asked for at its launch: the ring, at a multiple of its pattern, and two pairs' sums."""
        sums = 2 * self.warps * shape.group * (shape.head_dim + 4) * 4
        return 1024 + self.stages * 2 * _KEYS * shape.head_dim * 2 + sums

    def macros(self, shape: Shape) -> dict[str, int]:
        """What the kernel is compiled with."""
        names = {"D": shape.head_dim, "GROUP": shape.group, "KV_HEADS": shape.kv_heads, "BLOCK_SIZE": shape.block_size}
        names |= {"FUSED": shape.fused, "ROTARY": shape.rotary, "INTERLEAVED": shape.interleaved}
        names |= {"Q_NORM": shape.q_norm, "K_NORM": shape.k_norm}
        return {name: int(value) for name, value in names.items()} | {"WARPS": self.warps, "STAGES": self.stages}


@functools.cache
def sizes_for(shape: Shape) -> Sizes:
    """Two blocks a multiprocessor where they fit: one multiplies while the other finishes a pair.

    On an H200 (2026-12-01), 256 requests of 150 to 1,074 tokens of Llama-3.1-8B's shape: 174 us against 192.
    """
    two = Sizes(4, 8, 2)
    return two if two.shared_bytes(shape) <= _SHARED // 2 else Sizes(8, 16, 1)


def serves(q: Tensor, cache: KVCache, heads: int, requests: int) -> bool:
    """Whether the kernel attends up to `requests` decodes of a model with so many query heads, and faster.

    With no more pairs of a request and a key head than multiprocessors Triton's kernel is as fast or faster.
    """
    kv_heads, pages = cache.num_kv_heads, (cache.k, cache.v)
    return (
        q.dtype is torch.bfloat16
        and all(x.dtype is torch.bfloat16 and x.is_contiguous() for x in pages)
        and not cache.interleaved
        and cache.k.shape == cache.v.shape
        and cache.head_dim in _HEAD_DIMS
        and cache.block_size % _KEYS == 0
        and heads % kv_heads == 0
        and heads // kv_heads <= _MOST_GROUP
        and requests <= MOST_REQUESTS
        and compiler.unavailable() is None
        and requests * kv_heads > runtime.num_multiprocessors(q.device)
    )


def decode(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    out: Tensor,
    num_requests: int,
    scale: float,
    *,
    sizes: Sizes | None = None,
    blocks: int | None = None,
) -> None:
    """As `octavo.ops.triton.attention_decode.decode`, without window, softcap and sinks; q [T, Hq, D] contiguous.

    With `meta.counts` only the first `meta.counts[0]` requests decode, `num_requests` at most, and other rows stay.
    """
    shape = Shape(cache.head_dim, q.shape[1] // cache.num_kv_heads, cache.num_kv_heads, cache.block_size)
    given = _pointers(q)
    _launch(shape, sizes, given, cache, meta, out, num_requests, q.stride(0), scale, 0.0, blocks)


def rotary_and_attend(
    qkv: Tensor,
    scales: Tensor | None,
    columns: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    out: Tensor,
    scale: float,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool,
    *,
    sizes: Sizes | None = None,
    blocks: int | None = None,
) -> None:
    """As `octavo.ops.triton.attention_fused.rotary_and_attend`; cos_sin [positions, rotary] float32, contiguous."""
    group = out.shape[1] // (cache.num_kv_heads * cache.head_dim)
    norms = (q_norm is not None, k_norm is not None)
    shape = Shape(
        cache.head_dim, group, cache.num_kv_heads, cache.block_size, True, cos_sin.shape[1], interleaved, *norms
    )
    given = _pointers(qkv, scales, columns, positions, meta.slot_mapping, cos_sin, q_norm, k_norm, cache.k, cache.v)
    _launch(shape, sizes, given, cache, meta, out, qkv.shape[0], qkv.stride(0), scale, eps, blocks)


def _pointers(*tensors: Tensor | None) -> bytes:
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    return struct.pack(_POINTERS, *addresses, *[0] * (10 - len(addresses)))


def _launch(
    shape: Shape, sizes: Sizes | None, given: bytes, cache: KVCache, meta: AttentionMetadata, out: Tensor,
    requests: int, q_stride: int, scale: float, eps: float, blocks: int | None,
) -> None:  # fmt: skip
    device = out.device
    sizes = sizes_for(shape) if sizes is None else sizes
    blocks = sizes.resident * runtime.num_multiprocessors(device) if blocks is None else blocks
    rows = cache.num_blocks * cache.num_kv_heads * cache.block_size
    maps = [compiler.column_map(x.data_ptr(), rows, shape.head_dim * 2, _KEYS) for x in (cache.k, cache.v)]
    parts = torch.empty(2 * blocks * shape.group, shape.head_dim + 2, dtype=torch.float32, device=device)
    stats = parts.view(-1)[2 * blocks * shape.group * shape.head_dim :]
    tensors = (meta.block_table, meta.seq_lens, meta.counts, out, parts, stats, runtime.counters(device, blocks))
    numbers = (requests, _LEAST, meta.block_table.stride(0), q_stride, scale * _LOG2E, eps)
    early = runtime.uses_dependent_launch(device)
    kernel = _kernel(shape, sizes)
    kernel.launch((blocks, 1, 1), (*maps, given, *tensors, *numbers, int(early)), device, early)


@functools.cache
def _kernel(shape: Shape, sizes: Sizes) -> compiler.Kernel:
    threads = 32 * (sizes.warps + 2)
    return compiler.load("decode_attention", sizes.macros(shape), threads, sizes.shared_bytes(shape))
