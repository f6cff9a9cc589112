"""Decode attention inside a CUDA graph of steps with prompts, where only the device knows how many requests decode.

Rows of decodes come first in a step, and `attention_prefill` would walk each one's context with a tile that a few rows
of 128 fill. Here the programs of one launch are dealt out on the device to the decodes that there are: as many parts a
context as `attention_decode.decode` cuts for that number, so that a request gets the bits it would get from there.
Programs that are left over return once the kernel ahead has ended.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import runtime
from octavo.ops.triton.attention_decode import (
    MOST_SPLITS,
    NO_WINDOW,
    arrivals,
    attend_request,
    most_registers,
    parts_at_once,
    precision,
    score_factors,
    splits_for,
    tile_for,
)

ONE_EACH = tl.constexpr(1 << 30)  # programs, more than there are parts, so that no registers are kept for a second one


@triton.jit(do_not_specialize=["wave", "window", "stride_table"])
def leading_kernel(
    q, k_cache, v_cache, block_table, seq_lens, sinks, counts, out, parts, part_stats, arrived, wave, scale,
    softcap, window, stride_q, stride_table, stride_block, stride_head, HKV: tl.constexpr, MOST_SPLITS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (programs), in the order splits, key heads, requests; `wave` of them run at once."""
    place = tl.program_id(0)
    pairs = tl.load(counts) * HKV
    num_splits = tl.maximum(tl.minimum(wave // tl.maximum(pairs, 1), MOST_SPLITS), 1)  # as `splits_for`
    num_splits = tl.where((pairs > wave) & (pairs <= wave * 3 // 2), 2, num_splits)
    pair = place // num_splits
    is_used = pair < pairs
    request = tl.where(is_used, pair // HKV, 0)
    length = tl.load(seq_lens + request, mask=is_used, other=0)
    split = tl.where(is_used, place % num_splits, 1)  # of a context without parts: nothing is computed, nor written
    attend_request(
        q, k_cache, v_cache, block_table, sinks, counts, parts, part_stats, out, parts, part_stats, arrived, scale,
        softcap, window, 0, num_splits, stride_q, stride_table, stride_block, stride_head, split, num_splits,
        ONE_EACH, pair % HKV, HKV, request, length, GROUP, GROUP_ROWS, D, BLOCK_D, BLOCK_M, BLOCK_N, BLOCK_SIZE,
        HAS_SOFTCAP, HAS_SINKS, 0, PRECISION, MERGED, PDL,
    )  # fmt: skip


@functools.cache
def programs_for(max_requests: int, kv_heads: int, programs: int, device: torch.device) -> int:
    """The most programs that up to `max_requests` decodes take, with `programs` on a multiprocessor at once."""
    pairs = range(kv_heads, max_requests * kv_heads + 1, kv_heads)
    return max((n * splits_for(n, programs, device) for n in pairs), default=1)


def decode_leading(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    out: Tensor,
    max_requests: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    *,
    block_n: int | None = None,
) -> None:
    """`attention_decode.decode` of the first `meta.counts[0]` requests, `max_requests` at most; other rows stay."""
    assert meta.counts is not None
    heads, head_dim, kv_heads = q.shape[1], q.shape[2], cache.num_kv_heads
    group = heads // kv_heads
    tile = tile_for(head_dim, group, q.dtype, cache.dtype)
    block_n = tile.keys if block_n is None else block_n
    programs = programs_for(max_requests, kv_heads, tile.programs, q.device)
    parts = torch.empty(programs * group, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(programs * group, 2, dtype=torch.float32, device=q.device)
    group_rows, block_d = triton.next_power_of_2(group), max(16, triton.next_power_of_2(head_dim))
    factor, cap = score_factors(scale, softcap)
    pdl = runtime.uses_dependent_launch(q.device)
    leading_kernel[(programs,)](
        q, cache.k, cache.v, meta.block_table, meta.seq_lens, q if sinks is None else sinks, meta.counts, out, parts,
        stats, arrivals(q.device, max_requests * kv_heads), tile.programs * runtime.num_multiprocessors(q.device),
        factor, cap, NO_WINDOW if window is None else window, q.stride(0), meta.block_table.stride(0),
        cache.k.stride(0), cache.k.stride(1), HKV=kv_heads, MOST_SPLITS=MOST_SPLITS, GROUP=group,
        GROUP_ROWS=group_rows, D=head_dim, BLOCK_D=block_d, BLOCK_M=max(16, group_rows), BLOCK_N=block_n,
        BLOCK_SIZE=cache.block_size, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        PRECISION=precision(q.dtype), MERGED=parts_at_once(group_rows, block_d), PDL=pdl, launch_pdl=pdl, num_warps=4,
        num_stages=tile.stages, maxnreg=most_registers(head_dim, block_n, cache.dtype),
    )  # fmt: skip
