"""Attention of one new token a request over its pages, split along the context.

Split-KV decoding after Dao et al., "Flash-Decoding for long-context inference" (2023), with the online softmax of
Milakov and Gimelshein (2018). A program takes one part of one request's context for one key head, with all query heads
that share it in one tile. Parts are cut on the device out of `seq_lens`, so that the grid depends on the batch size
alone and a CUDA graph stays valid whatever the lengths. The last part to finish merges all, in the order of positions.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import runtime

LOG2E = 1.4426950408889634
NO_WINDOW = 2**31 - 1
FLOOR = tl.constexpr(-1e30)  # the running maximum before any score; finite, so that no difference is inf - inf
PREFETCHED = tl.constexpr(2)  # tiles that a program asks for before the kernel ahead has ended
MOST_SPLITS = 32  # more parts than that take longer to merge than they save


@triton.jit
def key_offsets(
    table, start, length, stride_block, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Where the rows of the keys start..start + BLOCK_N begin within one head of the cache: int64 [BLOCK_N].

    `start` is a multiple of BLOCK_N below `length`. Keys behind the context get the address of its last one: clamped
    instead of masked, so that the pages are known without a branch, ahead of their use.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        page = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        return page * stride_block + (start % BLOCK_SIZE + tl.arange(0, BLOCK_N)) * D
    keys = tl.minimum(start + tl.arange(0, BLOCK_N), length - 1)
    return tl.load(table + keys // BLOCK_SIZE).to(tl.int64) * stride_block + keys % BLOCK_SIZE * D


@triton.jit
def ask_for(
    k_head, v_head, table, first, last, past, stride_block, D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Ask for a tile of keys and values, those first <= j < last before `past`, in the L2 cache; nothing waits."""
    keys = tl.minimum(first + tl.arange(0, BLOCK_N), tl.minimum(last, past) - 1)
    pages = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
    lines: tl.constexpr = (D * k_head.dtype.element_ty.primitive_bitwidth + 1023) // 1024  # of 128 bytes
    step: tl.constexpr = 1024 // k_head.dtype.element_ty.primitive_bitwidth
    for line in tl.static_range(lines):
        cells = pages * stride_block + keys % BLOCK_SIZE * D + line * step
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [k_head + cells], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [v_head + cells], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def scores_base2(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of q [M, D] and k [N, D] in units of log2, so that exp2 serves; `scale` holds log2(e) without a softcap.

    With one, `scale` is 1 / softcap times the plain scale and `softcap` holds log2(e).
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_SOFTCAP:
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(s * 2.8853900817779268)))  # tanh: exp2(2 x log2(e)) = exp(2 x)
    return s


@triton.jit
def attend_part(
    q, k_head, v_head, table, first, last, low, length, row_max, sums, acc, scale, softcap, stride_block,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys first <= j < last (multiples of BLOCK_N) that lie in low <= j < length.

    `sums` [M, BLOCK_N] is added up by the caller: warps share a row here, so a sum in every turn would make them wait.
    """
    d = tl.arange(0, BLOCK_D)
    for start in range(first, last, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        seen = (keys >= low) & (keys < length)
        rows = key_offsets(table, start, length, stride_block, BLOCK_N, BLOCK_SIZE, D)
        mask = seen[:, None] & (d < D)[None]
        k = tl.load(k_head + rows[:, None] + d[None], mask=mask, other=0.0).to(q.dtype)
        s = scores_base2(q, k, scale, softcap, HAS_SOFTCAP, PRECISION)
        s = tl.where(seen[None], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, axis=1))
        p = tl.exp2(s - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        sums = sums * shrink[:, None] + p
        row_max = new_max
        v = tl.load(v_head + rows[:, None] + d[None], mask=mask, other=0.0).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return row_max, sums, acc


@triton.jit
def merge_parts(
    parts, part_stats, num_parts, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """The output [GROUP_ROWS, BLOCK_D] out of partial ones, MERGED at a time in the order of positions.

    All that a turn reads is asked for before any of it is used. Parts are the middle axis, which the compiler keeps
    within a thread, so that their sum takes no exchange between warps.
    """
    g, d = tl.arange(0, GROUP_ROWS), tl.arange(0, BLOCK_D)
    row_max = tl.full((GROUP_ROWS,), FLOOR, tl.float32)
    row_sum = tl.zeros((GROUP_ROWS,), tl.float32)
    acc = tl.zeros((GROUP_ROWS, BLOCK_D), tl.float32)
    for start in range(0, num_parts, MERGED):
        part = start + tl.arange(0, MERGED)
        live = (g < GROUP)[:, None] & (part < num_parts)[None]
        row = part[None] * GROUP + g[:, None]
        maxima = tl.load(part_stats + row * 2, mask=live, other=float("-inf"))
        sums = tl.load(part_stats + row * 2 + 1, mask=live, other=0.0)
        cells = parts + row[:, :, None] * D + d[None, None]
        partial = tl.load(cells, mask=live[:, :, None] & (d < D)[None, None], other=0.0)
        new_max = tl.maximum(row_max, tl.max(maxima, axis=1))
        weights = tl.exp2(maxima - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        acc = acc * shrink[:, None] + tl.sum(partial * weights[:, :, None], axis=1)
        row_sum = row_sum * shrink + tl.sum(sums * weights, axis=1)
        row_max = new_max
    return acc / row_sum[:, None]


@triton.jit
def shared_state(
    parts, part_stats, row_max, sums, acc, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The softmax of one request and key head after the keys that it shares, out of `attention_shared`'s parts."""
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    live = m < GROUP
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for split in tl.static_range(SPLITS):
        row = split * GROUP + m
        part_max = tl.load(part_stats + row * 2, mask=live, other=FLOOR)
        part_sum = tl.load(part_stats + row * 2 + 1, mask=live, other=0.0)
        part = tl.load(parts + (row * D)[:, None] + d[None], mask=live[:, None] & (d < D)[None], other=0.0)
        new_max = tl.maximum(row_max, part_max)
        shrink, weight = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)
        row_sum = row_sum * shrink + part_sum * weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        row_max = new_max
    return row_max, sums + tl.where(tl.arange(0, BLOCK_N) == 0, 1.0, 0.0)[None] * row_sum[:, None], acc


@triton.jit
def attend_request(
    q, k_cache, v_cache, block_table, sinks, num_shared, shared_parts, shared_stats, out, parts, part_stats, arrived,
    scale, softcap, window, part_tiles, max_parts, stride_q, stride_table, stride_block, stride_head, split, num_splits,
    num_programs, head, num_kv_heads, request, length,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SHARED_SPLITS: tl.constexpr, PRECISION: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What program `split` of `num_programs` does for a request and a key head, cut into `num_splits` parts or fewer.

    `part_tiles` > 0 fixes the tiles a part, cut by position from 0. With SHARED_SPLITS the first `num_shared` keys were
    attended before, and are skipped. What the kernel ahead writes, queries and the newest keys, is not read before it
    has ended; lengths, block tables and older keys are from before it.
    """
    low = tl.maximum(length - window, 0)
    if SHARED_SPLITS > 0:
        low = tl.load(num_shared)
    first_tile, end_tile = low // BLOCK_N, tl.cdiv(length, BLOCK_N)
    if part_tiles > 0:
        tiles = part_tiles
        base = first_tile // tiles * tiles
    else:
        tiles = tl.maximum(tl.cdiv(end_tile - first_tile, num_splits), 1)
        base = first_tile
    num_parts = tl.cdiv(tl.maximum(end_tile - base, 0), tiles)  # 0 for a request of length 0, which pads the batch
    table = block_table + request.to(tl.int64) * stride_table
    k_head, v_head = k_cache + head.to(tl.int64) * stride_head, v_cache + head.to(tl.int64) * stride_head
    if PDL:
        first = tl.maximum(base + split * tiles, first_tile) * BLOCK_N
        last = tl.minimum(base + (split + 1) * tiles, end_tile) * BLOCK_N
        for ahead in range(first, tl.minimum(last, first + PREFETCHED * BLOCK_N), BLOCK_N):
            ask_for(k_head, v_head, table, ahead, last, length, stride_block, D, BLOCK_N, BLOCK_SIZE)
        gdc_wait()
        gdc_launch_dependents()

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    cell = (m * D)[:, None] + d[None]
    in_tile = (m < GROUP)[:, None] & (d < D)[None]
    out_head = out + (request.to(tl.int64) * num_kv_heads + head) * (GROUP * D)
    if num_parts == 0 and split == 0:
        tl.store(out_head + cell, tl.zeros((BLOCK_M, BLOCK_D), out.dtype.element_ty), mask=in_tile)
    if split < num_parts:
        query = tl.load(q + request.to(tl.int64) * stride_q + head * GROUP * D + cell, mask=in_tile, other=0.0)
        pair = request * num_kv_heads + head
        parts += pair.to(tl.int64) * max_parts * (GROUP * D)
        part_stats += pair.to(tl.int64) * max_parts * (GROUP * 2)
        for part in range(split, num_parts, num_programs):
            row_max = tl.full((BLOCK_M,), FLOOR, tl.float32)
            sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            if HAS_SINKS:  # noqa: SIM102 - one is known to the compiler, the other to the device
                if part == 0:  # a score without a value: weight 1 at its own maximum
                    sink = tl.load(sinks + head * GROUP + m, mask=m < GROUP, other=0.0).to(tl.float32)
                    row_max = sink * 1.4426950408889634
                    sums += tl.where(tl.arange(0, BLOCK_N) == 0, 1.0, 0.0)[None]
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            if SHARED_SPLITS > 0:  # noqa: SIM102
                if part == 0:
                    row_max, sums, acc = shared_state(
                        shared_parts + pair.to(tl.int64) * (SHARED_SPLITS * GROUP * D),
                        shared_stats + pair.to(tl.int64) * (SHARED_SPLITS * GROUP * 2), row_max, sums, acc, GROUP, D,
                        BLOCK_D, BLOCK_M, BLOCK_N, SHARED_SPLITS,
                    )  # fmt: skip
            first = tl.maximum(base + part * tiles, first_tile)
            last = tl.minimum(base + (part + 1) * tiles, end_tile)
            row_max, sums, acc = attend_part(
                query, k_head, v_head, table, first * BLOCK_N, last * BLOCK_N, low, length, row_max, sums, acc, scale,
                softcap, stride_block, HAS_SOFTCAP, PRECISION, D, BLOCK_D, BLOCK_N, BLOCK_SIZE,
            )  # fmt: skip
            row_sum = tl.sum(sums, axis=1)
            if num_parts == 1:
                tl.store(out_head + cell, (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=in_tile)
            else:
                tl.store(parts + part * (GROUP * D) + cell, acc, mask=in_tile)
                stats = part_stats + (part * GROUP + m) * 2
                tl.store(stats, row_max, mask=m < GROUP)
                tl.store(stats + 1, row_sum, mask=m < GROUP)
        if num_parts > 1:
            tl.debug_barrier()  # every thread's part is written before one of them says so
            before = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
            if before == tl.minimum(num_parts, num_programs) - 1:
                merged = merge_parts(parts, part_stats, num_parts, GROUP, GROUP_ROWS, D, BLOCK_D, MERGED)
                g = tl.arange(0, GROUP_ROWS)
                cells = out_head + (g * D)[:, None] + d[None]
                live = (g < GROUP)[:, None] & (d < D)[None]
                tl.store(cells, merged.to(out.dtype.element_ty), mask=live)
                tl.store(arrived + pair, 0)  # ready for the next launch


@triton.jit(do_not_specialize=["window", "part_tiles", "max_parts", "stride_table"])
def decode_kernel(
    q, k_cache, v_cache, block_table, seq_lens, sinks, num_shared, shared_parts, shared_stats, out, parts, part_stats,
    arrived, scale, softcap, window, part_tiles, max_parts, stride_q, stride_table, stride_block, stride_head,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SHARED_SPLITS: tl.constexpr, PRECISION: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (splits, key heads, requests)."""
    request, num_splits = tl.program_id(2), tl.num_programs(0)
    length = tl.load(seq_lens + request)
    attend_request(
        q, k_cache, v_cache, block_table, sinks, num_shared, shared_parts, shared_stats, out, parts, part_stats,
        arrived, scale, softcap, window, part_tiles, max_parts, stride_q, stride_table, stride_block, stride_head,
        tl.program_id(0), num_splits, num_splits, tl.program_id(1), tl.num_programs(1), request, length, GROUP,
        GROUP_ROWS, D, BLOCK_D, BLOCK_M, BLOCK_N, BLOCK_SIZE, HAS_SOFTCAP, HAS_SINKS, SHARED_SPLITS, PRECISION, MERGED,
        PDL,
    )  # fmt: skip


def arrivals(device: torch.device, pairs: int) -> Tensor:
    """Zeroed counters, which each launch leaves zeroed; shared by the launches of a device, which never overlap."""
    return _zeros(device, max(65536, triton.next_power_of_2(pairs)))


@functools.cache
def _zeros(device: torch.device, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


class DecodeTile(NamedTuple):
    """Keys a tile, stages of its loop, and programs that share a multiprocessor."""

    keys: int
    stages: int
    programs: int


@functools.cache
def tile_for(head_dim: int, group: int, q_dtype: torch.dtype, cache_dtype: torch.dtype) -> DecodeTile:
    """16 KiB of keys a tile, so that three programs share a multiprocessor with two tiles under way each.

    Keys of a narrower type count as wide as the queries: they are widened in registers. Page numbers come one stage
    ahead of keys, so 5 stages are two tiles under way and 3 are one. Up to two query heads a key head leave registers
    for twice the keys, in two programs: 103 us against 114 for 64 requests of 1,500 tokens on an H200 (2026-11-30),
    while with four query heads 121 us against 113.
    """
    bytes_a_key = triton.next_power_of_2(head_dim) * max(q_dtype.itemsize, cache_dtype.itemsize)
    is_narrow = q_dtype.itemsize <= 2 and head_dim <= 128
    if is_narrow and group <= 2 and cache_dtype.itemsize == q_dtype.itemsize:
        return DecodeTile(max(16, min(128, 32768 // bytes_a_key)), 3, 2)
    return DecodeTile(max(16, min(128, 16384 // bytes_a_key)), 5 if is_narrow and group <= 32 else 3, 3)


def splits_for(pairs: int, programs: int, device: torch.device) -> int:
    """Parts a context for so many pairs of a request and a key head: all programs at work in one wave.

    A few more pairs than fit in one wave would leave the second nearly empty, so they are cut in two.
    """
    wave = programs * runtime.num_multiprocessors(device)
    if wave < pairs <= wave * 3 // 2:
        return 2
    return max(1, min(wave // pairs, MOST_SPLITS))


def most_registers(head_dim: int, block_n: int, cache_dtype: torch.dtype) -> int | None:
    """Registers a thread may have so that three programs of four warps fit, where few have to be spilled for that."""
    is_small = block_n * triton.next_power_of_2(head_dim) <= 8192 and cache_dtype.itemsize == 2
    return 168 if is_small else None


def parts_at_once(group_rows: int, block_d: int) -> int:
    """Parts that one turn of `merge_parts` takes: at most 64 registers a thread, and all of a short context's."""
    return max(1, min(16, 8192 // (group_rows * block_d)))


def decode(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    out: Tensor,
    num_requests: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    *,
    shared: tuple[Tensor, Tensor, int] | None = None,
    num_splits: int | None = None,
    part_keys: int | None = None,
    block_n: int | None = None,
    num_warps: int = 4,
    num_stages: int | None = None,
) -> None:
    """Write rows 0..num_requests - 1 of `out` [T, Hq * D]: request s has row s of q [T, Hq, D], contiguous heads.

    A request whose `seq_lens` is 0 pads the batch: zeros. By default the cuts depend on the number of requests, and so
    do the last bits of the result. `part_keys`, a multiple of the tile, cuts at its multiples instead. Then a request's
    parts and the order of their merge follow from its length alone, and every bit of it is the same in any batch and
    for any `num_splits` (how many programs share the parts). Partial sums take num_requests * Hq * D floats for each
    part that the block table has room for, so an engine would pass max_model_len / 16 or so. `shared` is what
    `attention_shared` leaves of the keys that all requests have in common: parts, their maxima and sums, parts a head.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = cache.num_kv_heads
    group = heads // kv_heads
    tile = tile_for(head_dim, group, q.dtype, cache.dtype)
    block_n = tile.keys if block_n is None else block_n
    num_stages = tile.stages if num_stages is None else num_stages
    if num_splits is None:
        num_splits = splits_for(num_requests * kv_heads, tile.programs, q.device)
    max_tiles = -(-meta.block_table.shape[1] * cache.block_size // block_n)
    num_splits = min(num_splits, max_tiles)
    part_tiles, max_parts = 0, num_splits
    if part_keys is not None:
        if part_keys % block_n:
            raise ValueError(f"part_keys must be a multiple of the tile, {block_n} keys, not {part_keys}")
        part_tiles = part_keys // block_n
        max_parts = -(-max_tiles // part_tiles)
        num_splits = min(num_splits, max_parts)
    pairs = num_requests * kv_heads
    parts = torch.empty(pairs * max_parts * group, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(pairs * max_parts * group, 2, dtype=torch.float32, device=q.device)
    group_rows = triton.next_power_of_2(group)
    block_d = max(16, triton.next_power_of_2(head_dim))
    factor, cap = score_factors(scale, softcap)
    pdl = runtime.uses_dependent_launch(q.device)
    shared_parts, shared_stats, shared_splits = shared or (parts, stats, 0)
    decode_kernel[(num_splits, kv_heads, num_requests)](
        q, cache.k, cache.v, meta.block_table, meta.seq_lens, q if sinks is None else sinks,
        meta.seq_lens if meta.num_shared is None else meta.num_shared, shared_parts, shared_stats, out, parts, stats,
        arrivals(q.device, pairs), factor, cap, NO_WINDOW if window is None else window, part_tiles, max_parts,
        q.stride(0), meta.block_table.stride(0),
        cache.k.stride(0), cache.k.stride(1), GROUP=group, GROUP_ROWS=group_rows,
        D=head_dim, BLOCK_D=block_d, BLOCK_M=max(16, group_rows), BLOCK_N=block_n, BLOCK_SIZE=cache.block_size,
        HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None, SHARED_SPLITS=shared_splits,
        PRECISION=precision(q.dtype), MERGED=parts_at_once(group_rows, block_d), PDL=pdl, launch_pdl=pdl,
        num_warps=num_warps, num_stages=num_stages,
        maxnreg=most_registers(head_dim, block_n, cache.dtype) if num_warps == 4 else None,
    )  # fmt: skip


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """`scale` and `softcap` as `scores_base2` wants them."""
    return (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)


def precision(dtype: torch.dtype) -> str:
    """How products of float32 are made: three TF32 products, near the exact one; other types ignore it."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
