"""Attention whose result for a query depends on its request's keys and its position alone, bit by bit.

One kernel serves decodes and prompts. A query's keys are walked from 0 in tiles of a fixed size, within parts of
PART_KEYS keys that begin with an empty sum and are merged in the order of positions; which other queries share the
tile does not show, since a tile of keys that a row does not see changes nothing (its weights are exactly 0 and the
maximum stays). Decodes of long contexts have a program for each part, and prompts one for all: it is the same compiled
code, and products and sums are not contracted, so that both round alike wherever the merge happens.

The online softmax is that of Milakov and Gimelshein (2018).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import runtime
from octavo.ops.triton.attention_decode import NO_WINDOW, key_offsets, precision, score_factors, scores_base2
from octavo.ops.triton.attention_prefill import _request_of

PART_KEYS = 2048
_FLOOR = tl.constexpr(-1e30)  # see attention_decode
_LOG2E = tl.constexpr(1.4426950408889634)


class Cut(NamedTuple):
    """What a head size and a type are cut into, for every step: rows and keys a tile, keys a part, warps, stages."""

    block_m: int
    block_n: int
    part_keys: int
    num_warps: int
    num_stages: int


@triton.jit
def _merge(row_max, row_sum, acc, part_max, part_sum, part_acc):
    """The sums of a part added to those of the keys before it."""
    new_max = tl.maximum(row_max, part_max)
    before, now = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)
    row_sum = row_sum * before + part_sum * now
    acc = acc * before[:, None] + part_acc * now[:, None]
    return new_max, row_sum, acc


@triton.jit
def _finished(row_sum, acc):
    """The quotient; zeros for a row without a key, which pads the batch."""
    return tl.math.div_rn(acc, tl.where(row_sum == 0.0, 1.0, row_sum)[:, None] + tl.zeros_like(acc))


@triton.jit
def _attend_part(
    q, k_head, v_head, table, first, last, positions, lowest, window, length, scale, softcap, stride_block,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys first <= j < last (multiples of BLOCK_N). Every tile is masked, so all round alike.

    Keys up to `lowest` are seen by no row: they are not read, because their pages may have been given away.
    """
    d = tl.arange(0, BLOCK_D)
    row_max = tl.full((BLOCK_M,), _FLOOR, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_N):
        cells = key_offsets(table, start, length, stride_block, BLOCK_N, BLOCK_SIZE, D)[:, None] + d[None]
        keys = start + tl.arange(0, BLOCK_N)
        seen = keys[None] <= positions[:, None]
        read = keys < length
        if HAS_WINDOW:
            seen = seen & (keys[None] > positions[:, None] - window)
            read = read & (keys > lowest)
        mask = read[:, None] & (d < D)[None]
        k = tl.load(k_head + cells, mask=mask, other=0.0).to(q.dtype)
        s = scores_base2(q, k, scale, softcap, HAS_SOFTCAP, PRECISION)
        s = tl.where(seen, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, axis=1))
        p = tl.exp2(s - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, axis=1)
        row_max = new_max
        v = tl.load(v_head + cells, mask=mask, other=0.0).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["first_request", "num_requests", "window", "is_split", "stride_table"])
def attend_kernel(
    q, k_cache, v_cache, block_table, query_start, seq_lens, sinks, out, parts, part_stats, first_request, num_requests,
    scale, softcap, window, is_split, stride_q, stride_table, stride_block, stride_head, HQ: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PART: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, key heads, parts of the longest context if `is_split`, else 1).

    With `is_split` each request has one row, and a program one part: where there are several, they go to
    parts [requests, key heads, parts, GROUP, D] and part_stats [.., GROUP, 2] for `merge_kernel`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
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
    end = first_position + tl.minimum(BLOCK_Q, num_rows - first_query)
    begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    first_part, end_part = begin // PART, tl.cdiv(end, PART)
    is_whole = (is_split == 0) | (end_part - first_part == 1)
    first_part = tl.where(is_split != 0, tl.maximum(tl.program_id(2), first_part), first_part)
    end_part = tl.where(is_split != 0, tl.minimum(tl.program_id(2) + 1, end_part), end_part)
    if (is_split != 0) & (first_part >= end_part):
        return

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
    if HAS_SINKS:  # a score without a value: weight 1 at its own maximum, before all keys
        sink = tl.load(sinks + head * GROUP + m % GROUP).to(tl.float32) * _LOG2E
        row_max = tl.where(is_whole, sink, row_max)
        row_sum = tl.where(is_whole, row_sum + 1.0, row_sum)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = block_table + request.to(tl.int64) * stride_table
    k_head, v_head = k_cache + head.to(tl.int64) * stride_head, v_cache + head.to(tl.int64) * stride_head
    for part in range(first_part, end_part):
        part_max, part_sum, part_acc = _attend_part(
            q_tile, k_head, v_head, table, tl.maximum(part * PART, begin), tl.minimum((part + 1) * PART, end),
            positions, first_position - window, window, length, scale, softcap, stride_block, HAS_WINDOW, HAS_SOFTCAP,
            PRECISION, D, BLOCK_D, BLOCK_M, BLOCK_N, BLOCK_SIZE,
        )  # fmt: skip
        row_max, row_sum, acc = _merge(row_max, row_sum, acc, part_max, part_sum, part_acc)
    if is_whole:
        tl.store(out + row * (HQ * D) + channel, _finished(row_sum, acc).to(out.dtype.element_ty), mask=cell_mask)
    else:
        area = ((nth * tl.num_programs(1) + head).to(tl.int64) * tl.num_programs(2) + first_part) * GROUP
        tl.store(parts + (area + m)[:, None] * D + d[None], acc, mask=cell_mask)
        tl.store(part_stats + (area + m) * 2, row_max, mask=live)
        tl.store(part_stats + (area + m) * 2 + 1, row_sum, mask=live)


@triton.jit(do_not_specialize=["window", "max_parts"])
def merge_kernel(
    seq_lens, sinks, out, parts, part_stats, window, max_parts, GROUP: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr, HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (requests, key heads): the parts of a decode, in the order of positions, as `attend_kernel` merges them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens + request)
    first_part = tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N // PART
    end_part = tl.cdiv(length, PART)
    if end_part - first_part == 1:
        return
    m, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    live = m < GROUP
    cell_mask = live[:, None] & (d < D)[None]
    row_max = tl.full((ROWS,), _FLOOR, tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        row_max = tl.load(sinks + head * GROUP + m, mask=live, other=0.0).to(tl.float32) * _LOG2E
        row_sum += 1.0
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    pair = (request * tl.num_programs(1) + head).to(tl.int64)
    for part in range(first_part, end_part):
        area = (pair * max_parts + part) * GROUP
        part_max = tl.load(part_stats + (area + m) * 2, mask=live, other=0.0)
        part_sum = tl.load(part_stats + (area + m) * 2 + 1, mask=live, other=0.0)
        part_acc = tl.load(parts + (area + m)[:, None] * D + d[None], mask=cell_mask, other=0.0)
        row_max, row_sum, acc = _merge(row_max, row_sum, acc, part_max, part_sum, part_acc)
    cells = out + (pair * GROUP + m)[:, None] * D + d[None]
    tl.store(cells, _finished(row_sum, acc).to(out.dtype.element_ty), mask=cell_mask)


def cut_for(head_dim: int, group: int, dtype: torch.dtype) -> Cut:
    """The cut of a layer's steps. It may depend on nothing that changes from step to step."""
    is_small = head_dim > 128 or dtype.itemsize > 2  # of registers, so the tile is
    rows = max(32 if is_small else 64, triton.next_power_of_2(group))
    return Cut(rows, 32 if is_small else 64, PART_KEYS, 4, 2 if dtype.itemsize > 2 else 3)


def paged_attention(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    cut: Cut | None = None,
) -> Any:
    """As `octavo.ops.paged_attention` for a cache that is `deterministic`; `cut` is for tests.

    Decodes of contexts that may be longer than a part take num_decodes * Hq * D floats for each part that the block
    table has room for.
    """
    if cache.interleaved or q.shape[1] % cache.num_kv_heads or q.shape[1] // cache.num_kv_heads > 64:
        return NotImplemented
    q = q.contiguous()
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    if cut is None:
        cut = cut_for(q.shape[2], q.shape[1] // cache.num_kv_heads, q.dtype)
    decodes, requests = meta.num_decodes, meta.seq_lens.shape[0]
    max_parts = -(-meta.block_table.shape[1] * cache.block_size // cut.part_keys)
    arguments = (q, cache, meta, out, scale, window, softcap, sinks, cut)
    if decodes and max_parts > 1:
        _launch(*arguments, 0, decodes, decodes, max_parts)
    else:
        decodes = 0
    if q.shape[0] > decodes:
        _launch(*arguments, decodes, requests - decodes, q.shape[0] - decodes, 1)
    return out


def _launch(
    q: Tensor, cache: KVCache, meta: AttentionMetadata, out: Tensor, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None, cut: Cut, first_request: int, num_requests: int, num_rows: int,
    max_parts: int,
) -> None:  # fmt: skip
    """The rows of some requests, in one program a tile or, where `max_parts` is not 1, one a part and a merge."""
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = cache.num_kv_heads
    group, block_d = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    # Float32 in any case, so that both ways run the same code.
    cells = num_requests * kv_heads * max_parts * group if max_parts > 1 else 1
    parts = torch.empty(cells, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(cells, 2, dtype=torch.float32, device=q.device)
    factor, cap = score_factors(scale, softcap)
    pdl = runtime.uses_dependent_launch(q.device)
    last_seen = NO_WINDOW if window is None else window
    options = {"launch_pdl": pdl, "enable_fp_fusion": False}
    tiles = num_rows // (cut.block_m // group) + num_requests
    attend_kernel[(tiles, kv_heads, max_parts)](
        q, cache.k, cache.v, meta.block_table, meta.query_start, meta.seq_lens, q if sinks is None else sinks, out,
        parts, stats, first_request, num_requests, factor, cap, last_seen, int(max_parts > 1), q.stride(0),
        meta.block_table.stride(0), cache.k.stride(0), cache.k.stride(1), HQ=heads, GROUP=group, D=head_dim,
        BLOCK_D=block_d, BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, PART=cut.part_keys, BLOCK_SIZE=cache.block_size,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        PRECISION=precision(q.dtype), PDL=pdl, num_warps=cut.num_warps, num_stages=cut.num_stages, **options,
    )  # fmt: skip
    if max_parts > 1:
        merge_kernel[(num_requests, kv_heads)](
            meta.seq_lens, q if sinks is None else sinks, out, parts, stats, last_seen, max_parts, GROUP=group,
            ROWS=triton.next_power_of_2(group), D=head_dim, BLOCK_D=block_d, BLOCK_N=cut.block_n, PART=cut.part_keys,
            HAS_SINKS=sinks is not None, PDL=pdl, num_warps=4, **options,
        )  # fmt: skip
