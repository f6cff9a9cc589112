"""Rotation, the write of the newest token and decode attention in one launch, for steps of few requests.

Each program of `attention_decode` turns its own group of queries out of the row of the projection. The one that takes
the last part of a context turns the new key too, writes it and its value to their page, and begins its softmax with
them out of registers; no program reads them from memory. While the projection ahead still runs, each program learns
its place and asks for its first keys and values: nothing of that is what the projection writes.

Steps of many requests take the kernel in CUDA C++ (`octavo.ops.cuda.decode_attention`) where it serves them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.cuda import decode_attention
from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import attention_decode, runtime
from octavo.ops.triton.attention_decode import FLOOR, NO_WINDOW, PREFETCHED, ask_for, attend_part, merge_parts
from octavo.ops.triton.rotary import clamp_limit, load_scaled, to_cache
from octavo.ops.triton.scaled import Scaled
from octavo.ops.triton.scaled import parts as scaled_parts

MAX_REQUESTS = 64  # from there on queries are turned again by so many programs that a launch costs less


@triton.jit
def _turned(
    row, factor, columns, first_channel, cos_row, norm, heads, live, eps, dtype: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, HAS_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads [H, BLOCK_D] of a row, normed and rotated in float32, rounded to `dtype`.

    Each channel reads its partner of the pair as well, so that no two threads have to exchange them.
    """
    d = tl.arange(0, BLOCK_D)
    half: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner, pair, is_first = d ^ 1, d // 2, d % 2 == 0
    else:
        is_first = d < half
        partner, pair = tl.where(is_first, d + half, d - half), tl.where(is_first, d, d - half)
    turns = d < ROTARY
    cells = first_channel + heads[:, None] * D
    mask = live[:, None] & (d < D)[None]
    x = load_scaled(row, factor, columns, cells + d[None], mask)
    y = load_scaled(row, factor, columns, cells + partner[None], live[:, None] & turns[None])
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x *= inverse * tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)[None]
        y *= inverse * tl.load(norm + partner, mask=turns, other=0.0).to(tl.float32)[None]
    cos = tl.load(cos_row + pair, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(cos_row + half + pair, mask=turns, other=0.0).to(tl.float32)
    return (x * cos[None] + y * tl.where(is_first, -sin, sin)[None]).to(dtype)


@triton.jit(do_not_specialize=["window", "max_parts", "stride_table"])
def fused_kernel(
    qkv, scales, columns, positions, cos_sin, q_norm, k_norm, slots, k_cache, v_cache, block_table, seq_lens, out,
    parts, part_stats, arrived, eps, scale, softcap, window, max_parts, stride_qkv, stride_cos, stride_table,
    stride_block, stride_head,
    HQ: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (splits, key heads, requests). scales, columns: of the rows and the columns of qkv, or None."""
    split, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(0)
    length = tl.load(seq_lens + request)
    past = length - 1  # keys in memory; the newest is in the row
    low = tl.maximum(length - window, 0)
    first_tile, end_tile = low // BLOCK_N, tl.cdiv(past, BLOCK_N)
    tiles = tl.maximum(tl.cdiv(end_tile - first_tile, num_splits), 1)
    num_parts = tl.where(length > 0, tl.maximum(tl.cdiv(end_tile - first_tile, tiles), 1), 0)
    first = (first_tile + split * tiles) * BLOCK_N
    last = tl.minimum(first + tiles * BLOCK_N, end_tile * BLOCK_N)
    table = block_table + request.to(tl.int64) * stride_table
    k_head, v_head = k_cache + head.to(tl.int64) * stride_head, v_cache + head.to(tl.int64) * stride_head
    if PDL:
        for ahead in range(first, tl.minimum(last, first + PREFETCHED * BLOCK_N), BLOCK_N):
            ask_for(k_head, v_head, table, ahead, last, past, stride_block, D, BLOCK_N, BLOCK_SIZE)
        gdc_wait()
        gdc_launch_dependents()

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    cell = (m * D)[:, None] + d[None]
    in_tile = (m < GROUP)[:, None] & (d < D)[None]
    pair = request * HKV + head
    out_head = out + pair.to(tl.int64) * (GROUP * D)
    if num_parts == 0 and split == 0:
        tl.store(out_head + cell, tl.zeros((BLOCK_M, BLOCK_D), out.dtype.element_ty), mask=in_tile)
    if split < num_parts:
        row = qkv + request.to(tl.int64) * stride_qkv
        factor = 1.0
        if scales is not None:
            factor = tl.load(scales + request)
        cos_row = cos_sin + tl.load(positions + request) * stride_cos
        dtype: tl.constexpr = qkv.dtype.element_ty
        query = _turned(
            row, factor, columns, head * GROUP * D, cos_row, q_norm, m, m < GROUP, eps, dtype, D, BLOCK_D, ROTARY,
            Q_NORM, INTERLEAVED,
        )  # fmt: skip
        row_max = tl.full((BLOCK_M,), FLOOR, tl.float32)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        if split == num_parts - 1:
            one = tl.arange(0, 1)
            k = _turned(
                row, factor, columns, (HQ + head) * D, cos_row, k_norm, one, one == 0, eps, tl.float32, D, BLOCK_D,
                ROTARY, K_NORM, INTERLEAVED,
            )  # fmt: skip
            v = load_scaled(row, factor, columns, (HQ + HKV + head) * D + d, d < D)[None]
            new_k = to_cache(k, k_cache.dtype.element_ty, LIMIT)
            new_v = to_cache(v, v_cache.dtype.element_ty, LIMIT)
            slot = tl.load(slots + request)
            target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * D + d[None]
            written = (d < D)[None] & (slot >= 0)
            tl.store(k_head + target, new_k, mask=written)
            tl.store(v_head + target, new_v, mask=written)
            # The first key of this softmax: weight 1 at its own maximum.
            row_max = tl.sum(query.to(tl.float32) * new_k.to(dtype).to(tl.float32), axis=1) * scale
            if HAS_SOFTCAP:
                row_max = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(row_max * 2.8853900817779268)))
            sums += tl.where(tl.arange(0, BLOCK_N) == 0, 1.0, 0.0)[None]
            acc += new_v.to(dtype).to(tl.float32)
        row_max, sums, acc = attend_part(
            query, k_head, v_head, table, first, last, low, past, row_max, sums, acc, scale, softcap, stride_block,
            HAS_SOFTCAP, PRECISION, D, BLOCK_D, BLOCK_N, BLOCK_SIZE,
        )  # fmt: skip
        row_sum = tl.sum(sums, axis=1)
        if num_parts == 1:
            tl.store(out_head + cell, (acc / row_sum[:, None]).to(dtype), mask=in_tile)
        else:
            parts += pair.to(tl.int64) * max_parts * (GROUP * D)
            part_stats += pair.to(tl.int64) * max_parts * (GROUP * 2)
            tl.store(parts + split * (GROUP * D) + cell, acc, mask=in_tile)
            stats = part_stats + (split * GROUP + m) * 2
            tl.store(stats, row_max, mask=m < GROUP)
            tl.store(stats + 1, row_sum, mask=m < GROUP)
            tl.debug_barrier()  # every thread's part is written before one of them says so
            before = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
            if before == num_parts - 1:
                merged = merge_parts(parts, part_stats, num_parts, GROUP, GROUP_ROWS, D, BLOCK_D, MERGED)
                g = tl.arange(0, GROUP_ROWS)
                cells = out_head + (g * D)[:, None] + d[None]
                tl.store(cells, merged.to(dtype), mask=(g < GROUP)[:, None] & (d < D)[None])
                tl.store(arrived + pair, 0)  # ready for the next launch


def rotary_and_attend(
    qkv: Tensor | Scaled,
    positions: Tensor,
    cos_sin: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool = False,
    *,
    num_splits: int | None = None,
    block_n: int | None = None,
) -> Any:
    """`rotary_and_store` and `paged_attention` of a step whose requests all decode: [T, num_heads * head_dim].

    The same numbers but for the rounding of sums. A request whose `seq_lens` is 0 pads the batch: its row is zeros and
    nothing is written; no slot below 0 is. NotImplemented where the two calls must do it.
    """
    qkv, scales, columns = scaled_parts(qkv)
    tokens, group, rotary = qkv.shape[0], num_heads // num_kv_heads, cos_sin.shape[1]
    if cache.interleaved or cache.deterministic or qkv.stride(1) != 1 or rotary > head_dim:
        return NotImplemented
    if num_heads % num_kv_heads or group > 16:
        return NotImplemented
    if meta.num_decodes != tokens or qkv.dtype.itemsize > 2 or head_dim > 128:
        return NotImplemented
    plain = window is None and softcap is None and cos_sin.dtype is torch.float32 and cos_sin.is_contiguous()
    by_shares = plain and num_splits is None and decode_attention.serves(qkv, cache, num_heads, tokens)
    if tokens > MAX_REQUESTS and not by_shares:
        return NotImplemented
    out = torch.empty(tokens, num_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    if by_shares:
        norms = (q_norm, k_norm, eps, interleaved)
        args = (qkv, scales, columns, positions, cos_sin, cache, meta, out, scale)
        decode_attention.rotary_and_attend(*args, *norms)
        return out
    tile = attention_decode.tile_for(head_dim, group, qkv.dtype, cache.dtype)
    block_n = tile.keys if block_n is None else block_n
    pairs = tokens * num_kv_heads
    if num_splits is None:
        num_splits = attention_decode.splits_for(pairs, tile.programs, qkv.device)
    num_splits = min(num_splits, -(-meta.block_table.shape[1] * cache.block_size // block_n))
    parts = torch.empty(pairs * num_splits * group, head_dim + 2, dtype=torch.float32, device=qkv.device)
    stats = parts.view(-1)[pairs * num_splits * group * head_dim :]
    group_rows, block_d = triton.next_power_of_2(group), max(16, triton.next_power_of_2(head_dim))
    factor, cap = attention_decode.score_factors(scale, softcap)
    pdl = runtime.uses_dependent_launch(qkv.device)
    fused_kernel[(num_splits, num_kv_heads, tokens)](
        qkv, scales, columns, positions, cos_sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        meta.slot_mapping, cache.k, cache.v, meta.block_table, meta.seq_lens, out, parts, stats,
        attention_decode.arrivals(qkv.device, pairs), eps, factor, cap, NO_WINDOW if window is None else window,
        num_splits, qkv.stride(0), cos_sin.stride(0), meta.block_table.stride(0), cache.k.stride(0), cache.k.stride(1),
        HQ=num_heads, HKV=num_kv_heads, GROUP=group, GROUP_ROWS=group_rows, D=head_dim, BLOCK_D=block_d,
        ROTARY=rotary, BLOCK_M=max(16, group_rows), BLOCK_N=block_n, BLOCK_SIZE=cache.block_size,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, INTERLEAVED=interleaved, LIMIT=clamp_limit(cache),
        HAS_SOFTCAP=softcap is not None, PRECISION=attention_decode.precision(qkv.dtype),
        MERGED=attention_decode.parts_at_once(group_rows, block_d), PDL=pdl, launch_pdl=pdl, num_warps=4,
        num_stages=tile.stages if block_n == tile.keys else 3,
        maxnreg=attention_decode.most_registers(head_dim, block_n, cache.dtype),
    )  # fmt: skip
    return out
