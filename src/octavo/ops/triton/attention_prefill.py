"""Causal attention of many new tokens a request over its pages.

FlashAttention (Dao, 2023) with the online softmax in registers. A tile packs BLOCK_M rows: consecutive queries of one
request times the query heads that share a key head. The grid follows from the number of tokens and of requests only; a
program finds its request by bisection in `query_start`, as in "The Anatomy of a Triton Attention Kernel"
(arXiv 2511.11581).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import runtime
from octavo.ops.triton.attention_decode import NO_WINDOW, key_offsets, precision, score_factors, scores_base2

_FLOOR = tl.constexpr(-1e30)  # see attention_decode


class Tiles(NamedTuple):
    """How a launch is cut: rows and keys a tile, warps a program, and how far loads run ahead."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _request_of(query_start, num_requests, tile, BLOCK_Q: tl.constexpr):
    """The last request whose first tile is `tile` or before.

    Request r's tiles begin at (query_start[r] - query_start[0]) // BLOCK_Q + r: room for each request's last,
    partly filled tile, without a prefix sum of rounded counts.
    """
    origin = tl.load(query_start)
    low, high = 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(query_start + middle) - origin) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend_tiles(
    q, k_head, v_head, table, first, last, positions, window, length, row_max, row_sum, acc, scale, softcap,
    stride_block, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys first <= j < last (multiples of BLOCK_N), all seen by every row unless MASKED.

    Keys that no row of the tile sees are not read: their pages may have been given away.
    """
    d = tl.arange(0, BLOCK_D)
    for start in range(first, last, BLOCK_N):
        rows = key_offsets(table, start, length, stride_block, BLOCK_N, BLOCK_SIZE, D)
        cells = rows[:, None] + d[None]
        keys = start + tl.arange(0, BLOCK_N)
        if MASKED:
            seen = keys[None] <= positions[:, None]
            read = keys < length
            if HAS_WINDOW:
                seen = seen & (keys[None] > positions[:, None] - window)
                read = read & (keys > tl.min(positions) - window)
            mask = read[:, None] & (d < D)[None]
            k = tl.load(k_head + cells, mask=mask, other=0.0).to(q.dtype)
            s = scores_base2(q, k, scale, softcap, HAS_SOFTCAP, PRECISION)
            s = tl.where(seen, s, float("-inf"))
        elif BLOCK_D == D:
            k = tl.load(k_head + cells).to(q.dtype)
            s = scores_base2(q, k, scale, softcap, HAS_SOFTCAP, PRECISION)
        else:
            k = tl.load(k_head + cells, mask=(d < D)[None], other=0.0).to(q.dtype)
            s = scores_base2(q, k, scale, softcap, HAS_SOFTCAP, PRECISION)
        new_max = tl.maximum(row_max, tl.max(s, axis=1))
        p = tl.exp2(s - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, axis=1)
        row_max = new_max
        if MASKED:
            v = tl.load(v_head + cells, mask=mask, other=0.0).to(q.dtype)
        elif BLOCK_D == D:
            v = tl.load(v_head + cells).to(q.dtype)
        else:
            v = tl.load(v_head + cells, mask=(d < D)[None], other=0.0).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return row_max, row_sum, acc


@triton.jit
def _write_zeros(
    out, head, first_row, end_row, BLOCK_Q: tl.constexpr, HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Zeros for the query heads of a key head in a tile of rows, those before `end_row`."""
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row = first_row + m // GROUP
    mask = (m // GROUP < BLOCK_Q) & (row < end_row)
    cells = row.to(tl.int64)[:, None] * (HQ * D) + (head * GROUP + m % GROUP)[:, None] * D + d[None]
    tl.store(out + cells, tl.zeros((BLOCK_M, BLOCK_D), out.dtype.element_ty), mask=mask[:, None] & (d < D)[None])


@triton.jit(do_not_specialize=["first_request", "num_requests", "window", "stride_table"])
def prefill_kernel(
    q, k_cache, v_cache, block_table, query_start, seq_lens, sinks, counts, out, first_request, num_requests, scale,
    softcap, window, stride_q, stride_table, stride_block, stride_head, HQ: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, key heads). The tiles of a request run from its end: the longest ones come first.

    With SKIPS only requests from counts[0] up to counts[1] are attended, by the first programs: which they are is known
    while the kernel ahead still runs. Those behind write zeros to the rows of the last request, which pads the step.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    if SKIPS:
        all_rows = tl.load(query_start + num_requests)
        first_request, end_request = tl.load(counts), tl.load(counts + 1)
        end_row = tl.load(query_start + end_request)
        num_requests = end_request - first_request
        tile = (end_row - tl.load(query_start + first_request)) // BLOCK_Q + num_requests - 1 - tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if SKIPS:  # noqa: SIM102 - one is known to the compiler, the other to the device
        if tile < 0:
            _write_zeros(out, head, end_row + (-1 - tile) * BLOCK_Q, all_rows, BLOCK_Q, HQ, GROUP, D, BLOCK_D, BLOCK_M)
            return
    query_start += first_request
    nth = _request_of(query_start, num_requests, tile, BLOCK_Q)
    first_row = tl.load(query_start + nth)
    num_rows = tl.load(query_start + nth + 1) - first_row
    first_query = (tile - (first_row - tl.load(query_start)) // BLOCK_Q - nth) * BLOCK_Q
    if first_query >= num_rows:
        return
    request = first_request + nth
    length = tl.load(seq_lens + request)
    first_position = length - num_rows + first_query
    last_position = first_position + tl.minimum(BLOCK_Q, num_rows - first_query) - 1

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = m // GROUP
    live = (query < BLOCK_Q) & (first_query + query < num_rows)
    cell_mask = live[:, None] & (d < D)[None]
    channel = (head * GROUP + m % GROUP)[:, None] * D + d[None]
    row = (first_row + first_query + query).to(tl.int64)[:, None]
    q_tile = tl.load(q + row * stride_q + channel, mask=cell_mask, other=0.0)
    positions = first_position + query
    row_max = tl.full((BLOCK_M,), _FLOOR, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:  # a score without a value: weight 1 at its own maximum
        row_max = tl.load(sinks + head * GROUP + m % GROUP).to(tl.float32) * 1.4426950408889634
        row_sum += 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = block_table + request.to(tl.int64) * stride_table
    k_head, v_head = k_cache + head.to(tl.int64) * stride_head, v_cache + head.to(tl.int64) * stride_head

    # Tiles from full_start to full_end are seen by every row whole.
    end = last_position + 1
    full_start = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        full_start = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N) * BLOCK_N
        full_start = tl.minimum(full_start, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        row_max, row_sum, acc = _attend_tiles(
            q_tile, k_head, v_head, table, begin, full_start, positions, window, length, row_max, row_sum, acc, scale,
            softcap, stride_block, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION, D, BLOCK_D, BLOCK_N, BLOCK_SIZE,
        )  # fmt: skip
    full_end = tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, full_start)
    row_max, row_sum, acc = _attend_tiles(
        q_tile, k_head, v_head, table, full_start, full_end, positions, window, length, row_max, row_sum, acc, scale,
        softcap, stride_block, False, HAS_WINDOW, HAS_SOFTCAP, PRECISION, D, BLOCK_D, BLOCK_N, BLOCK_SIZE,
    )  # fmt: skip
    row_max, row_sum, acc = _attend_tiles(
        q_tile, k_head, v_head, table, full_end, end, positions, window, length, row_max, row_sum, acc, scale, softcap,
        stride_block, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION, D, BLOCK_D, BLOCK_N, BLOCK_SIZE,
    )  # fmt: skip
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row before position 0, which pads the step: zeros
    tl.store(out + row * (HQ * D) + channel, (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=cell_mask)


def tiles_for(head_dim: int, dtype: torch.dtype, fills_gpu: bool) -> Tiles:
    """The cut for queries of this type; `fills_gpu`: there is a tile of 128 rows for every multiprocessor.

    All keep within the registers (float32, three products each, nearly so). The page numbers of a tile are loaded one
    stage ahead of its keys, so 5 stages are 2 tiles of keys under way.
    """
    if dtype.itemsize > 2:
        return Tiles(64, 32, 4, 2) if head_dim <= 128 else Tiles(32, 16, 4, 2)
    if head_dim > 128:
        return Tiles(128, 32, 8, 3) if fills_gpu else Tiles(64, 32, 4, 3)
    return Tiles(128, 64, 8, 5) if fills_gpu else Tiles(64, 64, 4, 3)


def prefill(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    out: Tensor,
    first_request: int,
    num_requests: int,
    num_rows: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Write the rows of requests first_request.. of `out` [T, Hq * D]; q is [T, Hq, D] with contiguous heads.

    `num_rows` is how many rows these requests have, or an upper bound; more makes programs that return at once. Where
    `meta.counts` is there, they are all of the step, and those that decode are left out.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    group = heads // cache.num_kv_heads
    if tiles is None:
        fills_gpu = num_rows * heads >= 128 * runtime.num_multiprocessors(q.device)
        tiles = tiles_for(head_dim, q.dtype, fills_gpu)
    block_m = max(tiles.block_m, triton.next_power_of_2(group))
    num_tiles = num_rows // (block_m // group) + (num_requests if meta.counts is None else meta.max_prompts + 1)
    factor, cap = score_factors(scale, softcap)
    pdl = runtime.uses_dependent_launch(q.device)
    prefill_kernel[(num_tiles, cache.num_kv_heads)](
        q, cache.k, cache.v, meta.block_table, meta.query_start, meta.seq_lens, q if sinks is None else sinks,
        meta.seq_lens if meta.counts is None else meta.counts, out, first_request, num_requests, factor, cap,
        NO_WINDOW if window is None else window, q.stride(0), meta.block_table.stride(0), cache.k.stride(0),
        cache.k.stride(1), HQ=heads, GROUP=group, D=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, BLOCK_SIZE=cache.block_size, HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None, PRECISION=precision(q.dtype), PDL=pdl,
        SKIPS=meta.counts is not None, launch_pdl=pdl, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
