"""Products of 8-bit rows and 8-bit weights: int8 with sums in int32, E4M3 with sums in float32.

y[m, n] = scale[m] * w_scale[n] * sum_k codes[m, k] w[n, k] + bias[n], rounded once. Five ways:

* One row: no matrix units, `gemv_8bit.py`.
* Few rows: reading W once is what takes the time. W is the large operand of the matrix units and the rows, padded to
  16, the small one. K is split where N gives too few programs, and the last program of a split to arrive adds the sums
  of all parts in a fixed order, so that the result does not depend on who comes first.
* Many rows: one program a multiprocessor walks over the tiles of y, in groups whose operands stay in the second-level
  cache; tensor descriptors (TMA) bring the operands.
* Many rows of int8 on Hopper: the same, with products kept in flight, `linear_int8_async.py`.
* cuBLAS, through torch, where the table says so: FP8 alone. It is fastest where it need not know the scales of rows,
  which are then applied after it, by the kernel that reads y if that one takes `Scaled`.

With PDL (programmatic dependent launch) a program asks for its weights while the kernel ahead still runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.ops.triton import runtime
from octavo.ops.triton.gemv_8bit import launch_one
from octavo.ops.triton.linear_8bit_parts import GROUP, apply_scales, column_factors, finish, prefetch_rows, takes_async
from octavo.ops.triton.runtime import Tile
from octavo.ops.triton.scaled import Scaled

BUCKETS = (1, 16, 32, 64, 128, 256, 512, 1024, 8192)  # numbers of rows with tiles of their own
TORCH = Tile(0, 0, 0, 0, 0, 0)  # stands for torch's own product in the table, with the scales of rows
UNSCALED = Tile(0, 0, 0, 1, 0, 0)  # the same without them: they are applied after it
FAST_SUMS = True  # cuBLAS adds up FP8 products within the matrix units alone, as Triton's kernels do
ASYNC_TILES = 128  # of y, from which on the kernel of `linear_int8_async.py` is taken where nobody measured
PREFETCH = tl.constexpr(1024)  # bytes of a row of W to ask for ahead

_launch_async = runtime.lazy("linear_int8_async", "launch")


@triton.jit(do_not_specialize=["M"])
def few_rows_kernel(
    codes, scale, w, x_tiles, w_tiles, w_scale, bias, residual, out, partial, counters, M, N,
    K: tl.constexpr, SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """codes [M, K] to out [M, N]; program (tile of N, part of K, tile of M).

    x_tiles, w_tiles: tensor descriptors of codes and w that bring the operands, or None for loads by threads.
    """
    TILES: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    EVEN: tl.constexpr = K % (BLOCK_K * SPLIT) == 0
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    first = tl.program_id(1) * (TILES * BLOCK_K)
    w_factor, shift = column_factors(w_scale, bias, n, N)  # so early that nobody waits for them at the end
    if PDL:
        prefetch_rows(w, row, first, K, min(PREFETCH, TILES * BLOCK_K))
        gdc_wait()
        gdc_launch_dependents()
    factor = tl.load(scale + m, mask=m < M, other=0)
    w_row = w + row.to(tl.int64)[:, None] * K
    x_row = codes + tl.minimum(m, M - 1).to(tl.int64)[None, :] * K
    total = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    for i in range(TILES):
        k = first + i * BLOCK_K + tl.arange(0, BLOCK_K)
        if w_tiles is not None:
            weight = w_tiles.load([tl.program_id(0) * BLOCK_N, first + i * BLOCK_K])
            x = x_tiles.load([tl.program_id(2) * BLOCK_M, first + i * BLOCK_K]).T
        elif EVEN:
            weight = tl.load(w_row + k[None, :])
            x = tl.load(x_row + k[:, None])
        else:
            weight = tl.load(w_row + k[None, :], mask=(k < K)[None, :], other=0.0)
            x = tl.load(x_row + k[:, None], mask=(k < K)[:, None], other=0.0)
        total = tl.dot(weight, x, total, out_dtype=SUM)
    if SPLIT == 1:
        finish(tl.trans(total), factor, w_factor, shift, residual, out, m, n, M, N)
    else:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        column = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        area = partial + column.to(tl.int64) * (SPLIT * SIZE)
        place = tl.arange(0, BLOCK_M)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        live = (m < M)[None, :] & (n < N)[:, None]
        tl.store(area + tl.program_id(1) * SIZE + place, total, mask=live)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(counters + column, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(counters + column, 0)  # for the next product
            here = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            inside = (m < M)[:, None] & (n < N)[None, :]
            whole = tl.zeros([BLOCK_M, BLOCK_N], SUM)
            for part in range(SPLIT):
                whole += tl.load(area + part * SIZE + here, mask=inside, other=0, cache_modifier=".cg")
            finish(whole, factor, w_factor, shift, residual, out, m, n, M, N)


@triton.jit(do_not_specialize=["M"])
def many_rows_kernel(
    codes, scale, w, w_scale, bias, residual, out, M, N,
    K: tl.constexpr, SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """codes [M, K] times w [N, K], both tensor descriptors, to out [M, N]; a program takes every num_programs-th tile.

    PARTS: the finished tile is written in 1 or 2 halves, which need less shared memory each.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    blocks_m = tl.cdiv(M, BLOCK_M)
    blocks_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), blocks_m * blocks_n, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * blocks_n)
        height = tl.minimum(blocks_m - group * GROUP, GROUP)
        inner = tile % (GROUP * blocks_n)
        first_m = (group * GROUP + inner % height) * BLOCK_M
        first_n = inner // height * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], SUM)
        for i in range(tl.cdiv(K, BLOCK_K)):
            x = codes.load([first_m, i * BLOCK_K])
            weight = w.load([first_n, i * BLOCK_K])
            total = tl.dot(x, weight.T, total, out_dtype=SUM)
        m = first_m + tl.arange(0, BLOCK_M)
        factor = tl.load(scale + m, mask=m < M, other=0)
        if PARTS == 1:
            n = first_n + tl.arange(0, BLOCK_N)
            w_factor, shift = column_factors(w_scale, bias, n, N)
            finish(total, factor, w_factor, shift, residual, out, m, n, M, N)
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(tl.permute(tl.reshape(total, [BLOCK_M, 2, HALF]), [0, 2, 1]))
            n = first_n + tl.arange(0, HALF)
            w_factor, shift = column_factors(w_scale, bias, n, N)
            finish(left, factor, w_factor, shift, residual, out, m, n, M, N)
            w_factor, shift = column_factors(w_scale, bias, n + HALF, N)
            finish(right, factor, w_factor, shift, residual, out, m, n + HALF, M, N)


def linear_8bit(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The product of codes [M, K] and weight [N, K], both int8 or both float8_e4m3fn and contiguous: [M, N].

    scale: float32 [M, 1]. weight_scale: float32 [N]. residual [M, N] of out_dtype, contiguous: gets the rounded product
    added, and is returned. tile: sizes other than those of the table, for benchmarks.
    """
    rows, k = codes.shape
    n = weight.shape[0]
    kind = "w8a8" if codes.dtype == torch.int8 else "fp8"
    if tile is None:
        tile = tile_8bit(kind, n, k, rows)
    if tile in (TORCH, UNSCALED):
        if takes_scaled_mm(codes, weight, out_dtype):
            if tile == UNSCALED:
                return apply_scales(unscaled_mm(codes, scale, weight, weight_scale), bias, residual)
            y = scaled_mm(codes, scale, weight, weight_scale, bias)
            return y if residual is None else residual.add_(y)
        tile = default_tile(n, k, bucket(rows))
    elif tile.k == 0 and not takes_async(codes):
        tile = default_tile(n, k, bucket(rows))
    out = torch.empty((rows, n), dtype=out_dtype, device=codes.device) if residual is None else residual
    assert out.dtype is out_dtype and out.is_contiguous()
    if rows > 0:
        _launch_of(tile)(codes, scale, weight, weight_scale, bias, residual, out, tile)
    return out


def _launch_of(tile: Tile) -> Callable[..., None]:
    if tile.rows == 1:
        return launch_one
    if tile.split != 0:
        return _launch_few
    return _launch_async if tile.k == 0 else _launch_many


def linear_for_reader(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor | Scaled:
    """`linear_8bit` in bfloat16, for a reader that applies the scales itself where that is faster."""
    (rows, k), n = codes.shape, weight.shape[0]
    if takes_scaled_mm(codes, weight, torch.bfloat16) and tile_8bit("fp8", n, k, rows) == UNSCALED:
        return unscaled_mm(codes, scale, weight, weight_scale)
    return linear_8bit(codes, scale, weight, weight_scale, None, torch.bfloat16)


def takes_scaled_mm(codes: Tensor, weight: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether torch has this product: FP8, with a bfloat16 result, N and K in multiples of 16."""
    fits = codes.shape[0] > 0 and weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
    return fits and codes.dtype == torch.float8_e4m3fn and out_dtype is torch.bfloat16


def unscaled_mm(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Scaled:
    """torch's FP8 product under scales of 1, and the scales that it lacks."""
    one = runtime.one(codes.device)
    values = torch._scaled_mm(codes, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=FAST_SUMS)
    return Scaled(values, scale, weight_scale)


def scaled_mm(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """torch's FP8 product by rows: codes [M, K], scale [M, 1], weight [N, K], weight_scale [N] to bfloat16 [M, N]."""
    bias = None if bias is None else bias.to(torch.bfloat16)
    return torch._scaled_mm(
        codes, weight.t(), scale, weight_scale[None], bias=bias, out_dtype=torch.bfloat16, use_fast_accum=FAST_SUMS
    )


def _launch_few(
    codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    tile: Tile,
) -> None:  # fmt: skip
    (rows, k), n = codes.shape, w.shape[0]
    block_k, split = _parts(k, tile.k, abs(tile.split))
    x_tiles = w_tiles = None
    if tile.split < 0:
        x_tiles = TensorDescriptor(codes, [rows, k], [k, 1], [tile.rows, block_k])
        w_tiles = TensorDescriptor(w, [n, k], [k, 1], [tile.n, block_k])
    columns, blocks = triton.cdiv(n, tile.n), triton.cdiv(rows, tile.rows)
    sums = _sums(codes)
    partial = counters = None
    if split > 1:
        size = columns * blocks * split * tile.n * tile.rows
        partial = torch.empty(size, dtype=torch.int32 if sums == tl.int32 else torch.float32, device=codes.device)
        counters = runtime.counters(codes.device, columns * blocks)
    pdl = runtime.uses_dependent_launch(codes.device)
    few_rows_kernel[(columns, split, blocks)](
        codes, scale, w, x_tiles, w_tiles, w_scale, bias, residual, out, partial, counters, rows, n, k, sums,
        tile.rows, tile.n, block_k, split, pdl, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


def _launch_many(
    codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    tile: Tile,
) -> None:  # fmt: skip
    (rows, k), n = codes.shape, w.shape[0]
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.n)
    x = TensorDescriptor(codes, [rows, k], [k, 1], [tile.rows, tile.k])
    weight = TensorDescriptor(w, [n, k], [k, 1], [tile.n, tile.k])
    pdl = runtime.uses_dependent_launch(codes.device)
    many_rows_kernel[(min(tiles, runtime.num_multiprocessors(codes.device)),)](
        x, scale, weight, w_scale, bias, residual, out, rows, n, k, _sums(codes),
        tile.rows, tile.n, tile.k, GROUP, 2 if tile.n >= 256 else 1, pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


def _sums(codes: Tensor) -> tl.dtype:
    return tl.int32 if codes.dtype == torch.int8 else tl.float32


@functools.cache
def _parts(k: int, block_k: int, split: int) -> tuple[int, int]:
    """(columns of a tile, parts of K) that fit a row of k, so that no part is empty."""
    block_k = min(block_k, triton.next_power_of_2(k))
    tiles = -(-k // block_k)
    split = min(split, tiles)
    return block_k, -(-tiles // -(-tiles // split))


@functools.cache
def tile_8bit(kind: str, n: int, k: int, m: int) -> Tile:
    """The sizes for m rows and a weight [n, k] of kind "w8a8" or "fp8", from the table of this GPU, or one of torch's.

    One row (`Tile.rows`) means the kernel without matrix units, no parts of K (`Tile.split`) the kernel of many rows,
    less than none that tensor descriptors bring the operands of the kernel of few rows. See also `async_tile`.
    """
    key = bucket(m)
    untuned = default_tile(n, k, key)
    if kind == "w8a8" and m > 128 and triton.cdiv(key, 128) * triton.cdiv(n, 128) >= ASYNC_TILES:
        untuned = async_tile(128, 128, 4, 3)
    if kind == "fp8" and m > 32:
        untuned = UNSCALED if m <= 1024 else TORCH
    return runtime.tuned_tiles().get((kind, n, k, key), untuned)


def async_tile(rows: int, n: int, warps: int, stages: int) -> Tile:
    """A tile of the kernel of `linear_int8_async.py`, which has its own number of columns of K: none in the table.

    Microseconds on an H200 of the products of Llama-3.1-8B [qkv, o, gate_up, down], `many_rows_kernel` with the best
    of its tiles against this kernel with tiles of 128 x 128 (4 warps, 3 stages) and of 64 x 256 (4 warps, 4 stages):

         256 rows: 18.7  13.5   65.3  40.4    20.4  19.7   55.3   63.4    16.4  15.2   66.6  47.3
         512 rows: 34.6  29.1  114.5  90.3    23.9  19.8   98.1   64.5    30.1  15.6  105.1  48.7
        2048 rows: 85.2  59.0  388.1 183.2    72.6  48.4  333.4  163.5

    Tiles of 128 x 128 win where y has 128 of them (o and down of 512 rows), and lose where it has 96 (qkv of 256).
    """
    return Tile(rows, n, 0, 0, warps, stages)


def bucket(m: int) -> int:
    """The smallest number of rows with tiles of its own that is at least m."""
    return next((rows for rows in BUCKETS if m <= rows), BUCKETS[-1])


def default_tile(n: int, k: int, m: int) -> Tile:
    """Sizes for a shape that nobody measured: about two programs a multiprocessor of an H200, or its largest tiles."""
    if m == 1:
        return Tile(1, 8 if n >= 8 * 528 else 4, 4096 if k <= 4096 else 2048, 1, 8, 1)
    if m > 128:
        for tile in (Tile(128, 256, 128, 0, 8, 3), Tile(128, 128, 128, 0, 8, 4), Tile(128, 64, 128, 0, 4, 4)):
            if -(-m // tile.rows) * -(-n // tile.n) >= 132:
                return tile
        return Tile(64, 64, 128, 0, 4, 4)
    block_n, block_k, warps = (64, 256, 4) if m <= 32 else (128, 128, 4 if m <= 64 else 8)
    split = max(1, min(264 * block_n // n, k // (4 * block_k), 16))
    return Tile(max(16, m), block_n, block_k, split, warps, 4)
