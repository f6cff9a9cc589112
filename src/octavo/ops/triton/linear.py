"""Products of few rows: y = x W^T where reading W [N, K] once is what takes the time.

One row is the business of `gemv.py`. For more, W is the large operand of the matrix units, and the rows of x, padded
to 16, the small one. Where N gives too few programs, K is split, and the last program of a split to arrive adds the
partial sums in a fixed order, so that results do not depend on who comes first.

The RMS norm needs no pass of its own: x * g enters the product, the squares of x are summed beside it, and the rows of
the result are scaled at the end, because the factor 1 / rms belongs to a whole row of x. Bias, gated activation and
residual are applied before the result is written.

With PDL (programmatic dependent launch) a program starts while the kernel ahead still runs. What it does until
`gdc_wait` is to ask for its weights, which no kernel writes.
"""

from __future__ import annotations

import functools
import math
from typing import Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import elementwise, runtime
from octavo.ops.triton.gemv import LINE, activate, gemv_codes_kernel, gemv_kernel, prefetch, weight_tile
from octavo.ops.triton.linear_w4 import UNIT, WORDS, expand_codes
from octavo.ops.triton.runtime import Tile

# Up to here the product applies the norm. With it every program passes x through registers, which beside codes leaves
# the matrix units idle for longer than a launch takes; weights of 8 and 16 bits wait for the memory anyway.
NORMED_ROWS = {"bf16": 16, "int8": 16, "int4": 1}


@triton.jit
def _norm_tile(norm, k, K: tl.constexpr):
    """The weight of the norm at columns k, asked for a tile ahead; columns where there is no norm."""
    factor = k
    if norm is not None:
        factor = tl.load(norm + k, mask=k < K, other=0)
    return factor


@triton.jit
def _input_tile(x, norm, factor, m, k, M, K: tl.constexpr, EVEN: tl.constexpr):
    """x [rows, columns] in bf16, times the weight of the norm, `factor`; and its squares."""
    inside = (m < M)[:, None]
    if not EVEN:
        inside = inside & (k < K)[None, :]
    value = tl.load(x + m[:, None] * K + k[None, :], mask=inside, other=0)
    square = value.to(tl.float32) * value.to(tl.float32)
    if norm is not None:
        value = (value.to(tl.float32) * factor.to(tl.float32)[None, :]).to(tl.bfloat16)
    return value, square


@triton.jit
def multiply(w, x, total, NATIVE: tl.constexpr):
    """total + w x^T for w [N, K] and x [M, K]; the interpreter has no product of bf16."""
    if NATIVE:
        total = tl.dot(w, tl.trans(x), total)
    else:
        total = tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), total)
    return total


@triton.jit
def _per_column(scale, row, column, K: tl.constexpr, GROUPS: tl.constexpr):
    return tl.load(scale + row[:, None] * GROUPS + (tl.minimum(column, K - 1) // (K // GROUPS))[None, :])


@triton.jit
def _factor(
    scale, offset, row, first,
    K: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The scales of a tile that lies in one group, or what nobody reads where `_product` takes none.

    Asked for a tile ahead, because the compiler would wait for them between two products.
    """
    factor = row
    if KIND != "bf16" and GROUPS > 1 and offset is None and (K // GROUPS) % WIDTH == 0:
        factor = tl.load(scale + row * GROUPS + tl.minimum(first // (K // GROUPS), GROUPS - 1)).to(tl.float32)
    return factor


@triton.jit
def _product(
    w, x, scale, offset, factor, row, first, total,
    K: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """total [BLOCK_N, BLOCK_M] plus a tile of the weight times a tile of x, transposed.

    Codes without an offset are multiplied as the small whole numbers that they are, and the sums of a group scaled;
    with one, or with groups narrower than the tile, the weight is first rounded to bf16, as the reference does.
    """
    if KIND == "int4":
        w = expand_codes(w, 8 if offset is None else 0, NATIVE)
    elif KIND == "int8":
        w = w.to(tl.bfloat16) if NATIVE else w.to(tl.float32).to(tl.bfloat16)
    if KIND == "bf16" or (GROUPS == 1 and offset is None):
        total = multiply(w, x, total, NATIVE)
    elif offset is None and (K // GROUPS) % WIDTH == 0:
        total += multiply(w, x, tl.zeros_like(total), NATIVE) * factor[:, None]
    else:
        column = first + tl.arange(0, WIDTH)
        value = w.to(tl.float32) * _per_column(scale, row, column, K, GROUPS).to(tl.float32)
        if offset is not None:
            value += _per_column(offset, row, column, K, GROUPS).to(tl.float32)
        total = multiply(value.to(tl.bfloat16), x, total, NATIVE)
    return total


@triton.jit
def _end(total, scale, offset, bias, row, inverse, GROUPS: tl.constexpr, KIND: tl.constexpr):
    """The factors that were left to the end, and the bias: [BLOCK_N, BLOCK_M]."""
    y = total * inverse
    if scale is not None and GROUPS == 1 and offset is None:
        y *= tl.load(scale + row).to(tl.float32)[:, None]
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    return y


@triton.jit
def _write(
    gate, up, square_sum, scale, offset, norm, bias, residual, out, m, n, M, N, eps,
    K: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile of whole sums."""
    row = tl.minimum(n, N - 1)
    inverse = tl.rsqrt(square_sum / K + eps)[None, :] if norm is not None else 1.0
    y = _end(gate, scale, offset, bias, row, inverse, GROUPS, KIND)
    if GATE is not None:
        y = activate(y, _end(up, scale, offset, bias, row + N, inverse, GROUPS, KIND), GATE)
    place = m.to(tl.int64)[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    if residual is not None:
        y += tl.load(residual + place, mask=inside, other=0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def few_rows_kernel(
    x, w, scale, offset, norm, bias, residual, out, partial, counters, M, N, eps,
    K: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """x [M, K] to out [M, N]; program (tile of N, part of K, tile of M).

    BLOCK_K counts columns; 4-bit tiles are one unit wide. LINES: how many lines of a row to prefetch before the wait,
    perhaps none.
    """
    WIDTH: tl.constexpr = 16 if KIND == "int4" else BLOCK_K  # what a row of the tile stores
    ROW: tl.constexpr = (K + 127) // 128 * 16 if KIND == "int4" else K
    TILES: tl.constexpr = (ROW + WIDTH * SPLIT - 1) // (WIDTH * SPLIT)
    EVEN: tl.constexpr = ROW % (WIDTH * SPLIT) == 0
    EVEN_INPUT: tl.constexpr = K % (BLOCK_K * SPLIT) == 0
    BYTES: tl.constexpr = 4 if KIND == "int4" else 2 if KIND == "bf16" else 1
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(n, N - 1)
    first = tl.program_id(1) * TILES
    if PDL:
        if LINES > 0:
            PART: tl.constexpr = TILES * WIDTH * BYTES
            prefetch(w, row, first * WIDTH * BYTES, ROW * BYTES, PART, LINES)
            if GATE is not None:
                prefetch(w, row + N, first * WIDTH * BYTES, ROW * BYTES, PART, LINES)
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    gate_factor = _factor(scale, offset, row, first * BLOCK_K, K, GROUPS, KIND, BLOCK_K)
    up_factor = gate_factor
    if GATE is not None:
        up_factor = _factor(scale, offset, row + N, first * BLOCK_K, K, GROUPS, KIND, BLOCK_K)
    norm_factor = _norm_tile(norm, first * BLOCK_K + tl.arange(0, BLOCK_K), K)
    for i in range(TILES):
        tile = first + i
        after = (tile + 1) * BLOCK_K
        next_gate = _factor(scale, offset, row, after, K, GROUPS, KIND, BLOCK_K)
        next_up = next_gate
        if GATE is not None:
            next_up = _factor(scale, offset, row + N, after, K, GROUPS, KIND, BLOCK_K)
        stored = tile * WIDTH + tl.arange(0, WIDTH)
        column = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        next_norm = _norm_tile(norm, column + BLOCK_K, K)
        value, square = _input_tile(x, norm, norm_factor, m, column, M, K, EVEN_INPUT)
        if norm is not None:
            squares += square
        w_gate = weight_tile(w, row, stored, ROW, EVEN)
        gate = _product(
            w_gate, value, scale, offset, gate_factor, row, tile * BLOCK_K, gate, K, GROUPS, KIND, BLOCK_K, NATIVE
        )
        if GATE is not None:
            w_up = weight_tile(w, row + N, stored, ROW, EVEN)
            up = _product(
                w_up, value, scale, offset, up_factor, row + N, tile * BLOCK_K, up, K, GROUPS, KIND, BLOCK_K, NATIVE
            )
        norm_factor, gate_factor, up_factor = next_norm, next_gate, next_up
    square_sum = tl.sum(squares, axis=1)
    if SPLIT == 1:
        _write(gate, up, square_sum, scale, offset, norm, bias, residual, out, m, n, M, N, eps, K, GROUPS, KIND, GATE)
    else:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        AREA: tl.constexpr = 2 * SIZE + BLOCK_M
        column = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        area = partial + column.to(tl.int64) * SPLIT * AREA
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = area + tl.program_id(1) * AREA
        tl.store(mine + place, gate)
        if GATE is not None:
            tl.store(mine + SIZE + place, up)
        if norm is not None:
            tl.store(mine + 2 * SIZE + tl.arange(0, BLOCK_M), square_sum)
        tl.debug_barrier()  # the stores of all threads come before the one thread's release
        if tl.atomic_add(counters + column, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(counters + column, 0)  # for the next product
            gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            square_sum = tl.zeros([BLOCK_M], tl.float32)
            for part in range(SPLIT):
                theirs = area + part * AREA
                gate += tl.load(theirs + place, cache_modifier=".cg")
                if GATE is not None:
                    up += tl.load(theirs + SIZE + place, cache_modifier=".cg")
                if norm is not None:
                    square_sum += tl.load(theirs + 2 * SIZE + tl.arange(0, BLOCK_M), cache_modifier=".cg")
            _write(
                gate, up, square_sum, scale, offset, norm, bias, residual, out, m, n, M, N, eps, K, GROUPS, KIND, GATE
            )  # fmt: skip


class Weight(Protocol):
    """What the kernels read: bf16 values, or codes with scale and offset [N, G]; see `weights.py`."""

    shape: tuple[int, int]
    kind: str
    unit: int
    groups: int
    data: Tensor
    scale: Tensor | None
    offset: Tensor | None

    def dense(self) -> Tensor: ...


def few_rows(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """residual + gate(rms_norm(x) W^T + bias), each part optional; x [M, K] bf16, contiguous.

    norm: weight [K] of an RMS norm of x with `eps`. gate: "silu" or "gelu_tanh" takes the first half of the rows of W
    as the gate of the second, so that the result is [M, N / 2]. residual: added to the result, same shape, not changed.
    tile: sizes other than those of the table, for benchmarks.
    """
    rows, k = x.shape
    n = weight.shape[0] if gate is None else weight.shape[0] // 2
    if tile is None:
        tile = runtime.tile(weight.kind, weight.shape[0], k, rows)
    if norm is not None and tile.split and rows > NORMED_ROWS[weight.kind] and k <= elementwise.MAX_WIDTH:
        x, norm = elementwise.rms_norm(x, norm, eps), None
    if tile.split == 0:
        return _in_steps(x, weight, bias, out_dtype, norm, eps, gate, residual)
    block_k, split, lines, span = _plan(tile, weight.kind, k, weight.unit, weight.groups)
    out = torch.empty((rows, n), dtype=out_dtype, device=x.device)
    pdl = runtime.uses_dependent_launch(x.device) and weight.data.nbytes <= runtime.dependent_bytes(weight.kind, rows)
    lines = lines if pdl and weight.data.nbytes <= runtime.prefetch_bytes(weight.kind, rows) else 0
    native = runtime.is_native()
    tensors = (x, weight.data, weight.scale, weight.offset, norm, bias, residual, out)
    stages = runtime.stages(tile, block_k, weight.kind, k // weight.groups, weight.offset is not None, gate is not None)
    options = {"num_warps": tile.warps, "num_stages": stages, "launch_pdl": pdl}
    if tile.rows == 1:
        codes = weight.kind == "int4"
        kernel, detail = (gemv_codes_kernel, span) if codes else (gemv_kernel, weight.kind)
        constants = (k, weight.groups, detail, gate, tile.n, block_k, lines, pdl, native)
        kernel[(triton.cdiv(n, tile.n),)](*tensors, n, eps, *constants, **options)
        return out
    columns, blocks = triton.cdiv(n, tile.n), triton.cdiv(rows, tile.rows)
    partial: Tensor | None = None
    counters: Tensor | None = None
    if split > 1:
        size = columns * blocks * split * (2 * tile.n + 1) * tile.rows
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = runtime.counters(x.device, columns * blocks)
    few_rows_kernel[(columns, split, blocks)](
        *tensors, partial, counters, rows, n, eps, k, weight.groups, weight.kind, gate,
        tile.rows, tile.n, block_k, split, lines, pdl, native, **options,
    )  # fmt: skip
    return out


def _in_steps(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    norm: Tensor | None,
    eps: float,
    gate: str | None,
    residual: Tensor | None,
) -> Tensor:
    """The same by cuBLAS and kernels for the rest, where that was measured to be faster."""
    if norm is not None:
        x = elementwise.rms_norm(x, norm, eps)
    y = plain_product(x, weight.dense(), bias, out_dtype)
    if gate is not None:
        y = elementwise.silu_mul(y) if gate == "silu" else elementwise.gelu_tanh_mul(y)
    return y if residual is None else y + residual


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """cuBLAS, which writes float32 itself where that is asked for."""
    x = x.to(weight.dtype)
    if out_dtype == torch.float32 and x.is_cuda:
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return y if bias is None else y.add_(bias)
    return F.linear(x, weight, bias).to(out_dtype)


@functools.cache
def _plan(tile: Tile, kind: str, k: int, unit: int, groups: int) -> tuple[int, int, int, int]:
    """(columns or, for one row, stored columns of a tile, parts of K, lines of a row to prefetch, parts of a word that
    share a scale) that fit the weight."""
    span = math.gcd(k // groups, UNIT) // WORDS
    stored = -(-k // UNIT) * WORDS if kind == "int4" else k
    block_k = min(tile.k, 1 << (stored - 1).bit_length())
    bits = 16 if kind == "bf16" else int(kind[3:])
    if tile.rows == 1:
        lines = -(-k * bits // 8 // LINE.value) if stored > block_k else 0  # the first tile is loaded, not prefetched
        return block_k, 1, 1 << (lines - 1).bit_length() if lines else 0, span
    if kind == "int4":
        block_k = UNIT
    elif kind == "int8":
        block_k = min(block_k, unit)
    tiles = -(-k // block_k)
    split = min(tile.split, tiles)
    split = -(-tiles // -(-tiles // split))  # no part is empty
    lines = -(-tiles // split) * block_k * bits // 8 // LINE.value
    return block_k, split, 1 << (max(lines, 1) - 1).bit_length(), span
