"""Decode attention of requests whose contexts begin with the same blocks: those are read once, for all of them.

One request's queries are a few rows of a matrix product; those of a whole batch fill it. So the shared keys are
attended by tiles that hold the queries of many requests, as for a prompt, and each request then goes on over its own
keys from that state of its softmax (Juravsky et al., "Hydragen", 2024; "cascade" in FlashInfer, Ye et al., 2025).
Without this, 64 requests that share 1,536 of 2,100 tokens read the shared ones 64 times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import runtime
from octavo.ops.triton.attention_decode import (
    FLOOR,
    ask_for,
    attend_part,
    decode,
    precision,
    score_factors,
    tile_for,
)

ROWS = 64  # queries a tile: what one instruction of the matrix units takes
MOST_KEYS = 64  # a tile: with 128, registers would be spilled
_MOST_SPLITS = 8  # parts of the shared keys: each is merged again by every request


@triton.jit
def shared_kernel(
    q, k_cache, v_cache, block_table, num_shared, parts, part_stats, num_rows, scale, softcap, stride_q, stride_block,
    stride_head, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (splits, key heads, tiles of queries). A part without keys leaves the state of an empty softmax."""
    split, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits, num_kv_heads = tl.num_programs(0), tl.num_programs(1)
    length = tl.load(num_shared)
    end_tile = tl.cdiv(length, BLOCK_N)
    tiles = tl.cdiv(end_tile, num_splits)
    first, last = split * tiles * BLOCK_N, tl.minimum((split + 1) * tiles, end_tile) * BLOCK_N
    k_head, v_head = k_cache + head.to(tl.int64) * stride_head, v_cache + head.to(tl.int64) * stride_head
    if PDL:
        if first < last:
            ask_for(k_head, v_head, block_table, first, last, length, stride_block, D, BLOCK_N, BLOCK_SIZE)
        gdc_wait()
        gdc_launch_dependents()

    row, d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    request, member = row // GROUP, row % GROUP
    mask = (row < num_rows)[:, None] & (d < D)[None]
    cells = request.to(tl.int64) * stride_q + (head * GROUP + member) * D
    query = tl.load(q + cells[:, None] + d[None], mask=mask, other=0.0)
    row_max = tl.full((BLOCK_M,), FLOOR, tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max, sums, acc = attend_part(
        query, k_head, v_head, block_table, first, last, 0, length, row_max, sums, acc, scale, softcap, stride_block,
        HAS_SOFTCAP, PRECISION, D, BLOCK_D, BLOCK_N, BLOCK_SIZE,
    )  # fmt: skip
    place = ((request.to(tl.int64) * num_kv_heads + head) * num_splits + split) * GROUP + member
    tl.store(parts + place[:, None] * D + d[None], acc, mask=mask)
    tl.store(part_stats + place * 2, row_max, mask=row < num_rows)
    tl.store(part_stats + place * 2 + 1, tl.sum(sums, axis=1), mask=row < num_rows)


def decode_shared(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    out: Tensor,
    scale: float,
    softcap: float | None = None,
    *,
    num_splits: int | None = None,
    block_n: int | None = None,
) -> None:
    """`attention_decode.decode` of a step of decodes alone, where `meta.num_shared` tells the keys in common.

    Every request that is no padding has more keys than those; they are read from the pages of the first request.
    """
    requests, heads, head_dim = q.shape
    kv_heads = cache.num_kv_heads
    group = heads // kv_heads
    tiles = triton.cdiv(requests * group, ROWS)
    if block_n is None:
        block_n = min(MOST_KEYS, tile_for(head_dim, group, q.dtype, cache.dtype).keys)
    if num_splits is None:
        programs = 2 * runtime.num_multiprocessors(q.device)
        num_splits = max(1, min(_MOST_SPLITS, programs // (tiles * kv_heads)))
    parts = torch.empty(requests * kv_heads * num_splits * group, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(requests * kv_heads * num_splits * group, 2, dtype=torch.float32, device=q.device)
    factor, cap = score_factors(scale, softcap)
    pdl = runtime.uses_dependent_launch(q.device)
    shared_kernel[(num_splits, kv_heads, tiles)](
        q, cache.k, cache.v, meta.block_table, meta.num_shared, parts, stats, requests * group, factor, cap,
        q.stride(0), cache.k.stride(0), cache.k.stride(1), GROUP=group, D=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_M=ROWS, BLOCK_N=block_n, BLOCK_SIZE=cache.block_size,
        HAS_SOFTCAP=softcap is not None, PRECISION=precision(q.dtype), PDL=pdl, launch_pdl=pdl, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    decode(q, cache, meta, out, requests, scale, None, softcap, shared=(parts, stats, num_splits))
