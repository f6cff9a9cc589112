"""Multi-head latent attention (DeepSeek-V2, section 2.1) over pages that hold a token's latent row once.

A program takes one query token with some of its heads, which share every key, and a part of its context: the heads are
the rows of its products, so a tile of latents is read once for scores and values. Which token belongs to which request
is looked up on the device, and the grid follows from the number of tokens alone, so that CUDA graphs stay valid
whatever the lengths. Parts are merged by a second kernel, in the order of positions (split-KV decoding after Dao et
al., "Flash-Decoding for long-context inference", 2023; online softmax of Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import runtime
from octavo.ops.triton.attention_decode import LOG2E, key_offsets, precision
from octavo.ops.triton.rotary import FLOAT8_MAX, to_cache

_FLOOR = tl.constexpr(-1e30)  # see attention_decode
_HEADS = 8  # query heads that one program rotates
_MOST_SPLITS = 32
_FEWEST_KEYS = 128  # a part of a context has, for its merging to be worth it


@triton.jit
def _turned(row, stride, lanes, live, cos, sin, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both channels of each rotated pair of some rows, float32 [rows, PAIRS], and where they lie."""
    pair = tl.arange(0, PAIRS)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    mask = live[:, None] & (pair < HALF)[None]
    base = row + lanes[:, None] * stride
    a = tl.load(base + first[None], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(base + second[None], mask=mask, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin, first, second, mask


@triton.jit(do_not_specialize=["stride_block"])
def store_kernel(
    q, latent, positions, cos_sin, slots, norm, cache, q_out, eps, stride_q, stride_head, stride_latent, stride_cos,
    stride_block, H: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, 1 + parts of the heads): the first program of a token writes its latent row, the others rotate."""
    token, part = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    cos_row = cos_sin + tl.load(positions + token) * stride_cos
    cos = tl.load(cos_row + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None]
    sin = tl.load(cos_row + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None]
    if part > 0:
        heads = (part - 1) * HEADS + tl.arange(0, HEADS)
        row = q + token.to(tl.int64) * stride_q
        a, b, first, second, mask = _turned(row, stride_head, heads, heads < H, cos, sin, HALF, PAIRS, INTERLEAVED)
        out = q_out + (token.to(tl.int64) * H + heads)[:, None] * (2 * HALF)
        tl.store(out + first[None], a.to(q_out.dtype.element_ty), mask=mask)
        tl.store(out + second[None], b.to(q_out.dtype.element_ty), mask=mask)
        return
    slot = tl.load(slots + token)
    if slot >= 0:
        dtype: tl.constexpr = cache.dtype.element_ty
        row = latent + token.to(tl.int64) * stride_latent
        out = cache + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * (RANK + 2 * HALF)
        r = tl.arange(0, BLOCK_R)
        x = tl.load(row + r, mask=r < RANK, other=0.0).to(tl.float32)
        weight = tl.load(norm + r, mask=r < RANK, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x) / RANK + eps) * weight
        tl.store(out + r, to_cache(x.to(latent.dtype.element_ty).to(tl.float32), dtype, LIMIT), mask=r < RANK)
        one = tl.arange(0, 1)
        a, b, first, second, mask = _turned(row + RANK, 0, one, one == 0, cos, sin, HALF, PAIRS, INTERLEAVED)
        tl.store(
            out + RANK + first[None], to_cache(a.to(latent.dtype.element_ty).to(tl.float32), dtype, LIMIT), mask=mask
        )
        tl.store(
            out + RANK + second[None], to_cache(b.to(latent.dtype.element_ty).to(tl.float32), dtype, LIMIT), mask=mask
        )


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
) -> Any:
    """As `octavo.ops.latent_rotary_and_store`."""
    tokens, heads, turned = q.shape
    if q.stride(2) != 1 or latent.stride(1) != 1 or cache.v is not cache.k:
        return NotImplemented
    rank, half = norm.shape[0], turned // 2
    out = torch.empty(tokens, heads, turned, dtype=q.dtype, device=q.device)
    store_kernel[(tokens, 1 + triton.cdiv(heads, _HEADS))](
        q, latent, positions, cos_sin, meta.slot_mapping, norm, cache.k, out, eps, q.stride(0), q.stride(1),
        latent.stride(0), cos_sin.stride(0), cache.k.stride(0), H=heads, RANK=rank,
        BLOCK_R=triton.next_power_of_2(rank), HALF=half, PAIRS=triton.next_power_of_2(half), HEADS=_HEADS,
        BLOCK_SIZE=cache.block_size, INTERLEAVED=interleaved, LIMIT=FLOAT8_MAX if cache.dtype.itemsize == 1 else 0.0,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _owner(query_start, num_requests, token):
    """The request that a token belongs to: the last that begins at it or before."""
    low, high = 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= token:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend_latents(
    q_content, q_turned, pages, table, first, last, seen, row_max, row_sum, acc, scale, stride_block,
    PRECISION: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, TURNED: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys first <= j < last (`first` a multiple of BLOCK_N) below `seen`."""
    r, p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    for start in range(first, last, BLOCK_N):
        live = start + tl.arange(0, BLOCK_N) < seen
        rows = pages + key_offsets(table, start, seen, stride_block, BLOCK_N, BLOCK_SIZE, RANK + TURNED)[:, None]
        content = tl.load(rows + r[None], mask=live[:, None] & (r < RANK)[None], other=0.0).to(q_content.dtype)
        turned = tl.load(rows + RANK + p[None], mask=live[:, None] & (p < TURNED)[None], other=0.0).to(q_content.dtype)
        s = tl.dot(q_content, tl.trans(content), input_precision=PRECISION)
        s = tl.dot(q_turned, tl.trans(turned), s, input_precision=PRECISION) * scale
        s = tl.where(live[None], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, axis=1))
        weights = tl.exp2(s - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        row_max = new_max
        acc = tl.dot(weights.to(q_content.dtype), content, acc * shrink[:, None], input_precision=PRECISION)
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["num_requests", "stride_table", "stride_block"])
def attend_kernel(
    q, pages, block_table, query_start, seq_lens, out, parts, part_stats, num_requests, scale, stride_table,
    stride_block, H: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, parts of the heads, tokens). Several parts leave their sums to `merge_kernel`."""
    split, token = tl.program_id(0), tl.program_id(2)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    request = _owner(query_start, num_requests, token)
    begin, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    seen = tl.load(seq_lens + request) - (end - 1 - token)  # keys up to the token's own
    seen = tl.where((token < begin) | (token >= end), 0, tl.maximum(seen, 0))  # none for rows that pad the step
    tiles = tl.cdiv(tl.cdiv(seen, BLOCK_N), SPLITS)
    first, last = split * tiles * BLOCK_N, tl.minimum((split + 1) * tiles * BLOCK_N, seen)

    r, p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    live = heads < H
    q_rows = q + (token.to(tl.int64) * H + heads)[:, None] * (RANK + TURNED)
    q_content = tl.load(q_rows + r[None], mask=live[:, None] & (r < RANK)[None], other=0.0)
    q_turned = tl.load(q_rows + RANK + p[None], mask=live[:, None] & (p < TURNED)[None], other=0.0)
    row_max = tl.full((BLOCK_H,), _FLOOR, tl.float32)
    row_sum = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
    table = block_table + request.to(tl.int64) * stride_table
    row_max, row_sum, acc = _attend_latents(
        q_content, q_turned, pages, table, first, last, seen, row_max, row_sum, acc, scale, stride_block, PRECISION,
        RANK, BLOCK_R, TURNED, BLOCK_P, BLOCK_N, BLOCK_SIZE,
    )  # fmt: skip
    mask = live[:, None] & (r < RANK)[None]
    if SPLITS == 1:
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        cells = out + (token.to(tl.int64) * H + heads)[:, None] * RANK + r[None]
        tl.store(cells, acc.to(out.dtype.element_ty), mask=mask)
    else:
        row = (token.to(tl.int64) * H + heads) * SPLITS + split
        tl.store(parts + row[:, None] * RANK + r[None], acc, mask=mask)
        tl.store(part_stats + row * 2, row_max, mask=live)
        tl.store(part_stats + row * 2 + 1, row_sum, mask=live)


@triton.jit
def merge_kernel(parts, part_stats, out, RANK: tl.constexpr, BLOCK_R: tl.constexpr, SPLITS: tl.constexpr):
    """Grid (tokens * heads): the parts of one head of one token, in the order of positions."""
    row = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    row_max, row_sum, acc = _FLOOR, 0.0, tl.zeros((BLOCK_R,), tl.float32)
    for split in range(SPLITS):
        part_max = tl.load(part_stats + (row * SPLITS + split) * 2)
        part_sum = tl.load(part_stats + (row * SPLITS + split) * 2 + 1)
        part = tl.load(parts + (row * SPLITS + split) * RANK + r, mask=r < RANK, other=0.0)
        new_max = tl.maximum(row_max, part_max)
        shrink, weight = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)
        row_sum = row_sum * shrink + part_sum * weight
        acc = acc * shrink + part * weight
        row_max = new_max
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(out + row * RANK + r, acc.to(out.dtype.element_ty), mask=r < RANK)


def latent_attention(q: Tensor, cache: KVCache, meta: AttentionMetadata, scale: float, rank: int) -> Any:
    """As `octavo.ops.latent_attention`; rows that belong to no request, or to one of length 0, are zeros."""
    if cache.v is not cache.k or cache.interleaved or cache.num_kv_heads != 1:
        return NotImplemented
    q = q.contiguous()
    tokens, heads, row_size = q.shape
    block_h, block_n, warps = tile_for(heads, q.dtype, cache.dtype)
    head_tiles = triton.cdiv(heads, block_h)
    most = triton.cdiv(meta.block_table.shape[1] * cache.block_size, _FEWEST_KEYS)
    splits = splits_for(tokens * head_tiles, most, q.device)
    out = torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
    parts = torch.empty(tokens * heads * splits if splits > 1 else 0, rank, dtype=torch.float32, device=q.device)
    stats = torch.empty(parts.shape[0], 2, dtype=torch.float32, device=q.device)
    block_r = max(16, triton.next_power_of_2(rank))
    attend_kernel[(splits, head_tiles, tokens)](
        q, cache.k, meta.block_table, meta.query_start, meta.seq_lens, out, parts, stats, meta.seq_lens.shape[0],
        scale * LOG2E, meta.block_table.stride(0), cache.k.stride(0), H=heads, RANK=rank, BLOCK_R=block_r,
        TURNED=row_size - rank, BLOCK_P=max(16, triton.next_power_of_2(row_size - rank)), BLOCK_H=block_h,
        BLOCK_N=block_n, BLOCK_SIZE=cache.block_size, SPLITS=splits, PRECISION=precision(q.dtype), num_warps=warps,
        num_stages=2,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(tokens * heads,)](parts, stats, out, RANK=rank, BLOCK_R=block_r, SPLITS=splits, num_warps=4)
    return out


def tile_for(heads: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> tuple[int, int, int]:
    """Heads and keys a tile, and warps: with 64 heads of 512 numbers the sums fill half the registers of 8 warps.

    Latents of a narrower type are widened in registers, of which 32 heads leave enough.
    """
    if dtype.itemsize > 2:
        return 16, 16, 4
    block_h = min(64 if cache_dtype == dtype else 32, max(16, triton.next_power_of_2(heads)))
    return block_h, 32, 8 if block_h > 16 else 4


def splits_for(programs: int, most: int, device: torch.device) -> int:
    """Parts a context: all programs at work in one wave, a power of two so that few kernels are compiled."""
    wanted = min(runtime.num_multiprocessors(device) // max(programs, 1), most, _MOST_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1
