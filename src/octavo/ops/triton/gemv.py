"""The product of one row, y = x W^T: see `linear.py` for the prologue and epilogue that it shares.

A program multiplies BLOCK_N rows of W element by element, 16 bytes of a row a thread, with the next tile on its way
while it computes; sums cross threads once, at the end. The first tile is asked for before the kernel ahead has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.linear_w4 import expand_floats


@triton.jit
def activate(gate, up, GATE: tl.constexpr):
    """silu(gate) * up, or GELU with its tanh approximation: 0.5 (1 + tanh(z)) is sigmoid(2 z)."""
    if GATE == "silu":
        z = gate
    else:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp(-z)) * up


@triton.jit
def weight_tile(w, row, k, ROW: tl.constexpr, EVEN: tl.constexpr):
    """Rows of the weight at stored columns k; EVEN says that none is past the end."""
    pointer = w + row.to(tl.int64)[:, None] * ROW + k[None, :]
    if EVEN:
        return tl.load(pointer)
    return tl.load(pointer, mask=(k < ROW)[None, :], other=0)


@triton.jit
def _factors(scale, row, byte, ROW: tl.constexpr, GROUPS: tl.constexpr):
    """The scales (or offsets) of codes at these bytes: [rows, bytes]."""
    group = tl.minimum(byte, ROW - 1) // (ROW // GROUPS)
    return tl.load(scale + row[:, None] * GROUPS + group[None, :]).to(tl.float32)


@triton.jit
def _chunks(x, CHUNK: tl.constexpr):
    """Sums [R, B / CHUNK] of neighbours in a row of x [R, B], which one thread holds."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // CHUNK, CHUNK]), axis=2)


@triton.jit
def _input_row(x, norm, k, K: tl.constexpr, IS_DENSE: tl.constexpr):
    """x at columns k, times the weight of the norm; and its squares. [1, columns]

    Threads hold x as they hold the weight. Of bf16 weights that is what a load of [1, columns] makes; beside codes it
    is not, and a vector is moved to the threads that need it, where a matrix would draw the codes after it.
    """
    if IS_DENSE:
        k = k[None, :]
    value = tl.load(x + k, mask=k < K, other=0).to(tl.float32)
    square = value * value
    if norm is not None:
        value *= tl.load(norm + k, mask=k < K, other=0).to(tl.float32)
    if not IS_DENSE:
        value, square = value[None, :], square[None, :]
    return value, square


@triton.jit
def _gemv_tile(
    w, low, high, scale, offset, row, first,
    ROW: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, CHUNK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """What a tile of the weight adds to the sums of its chunks; 4-bit sums are 1/16 of the true ones."""
    SIXTEENTH: tl.constexpr = 0.0625 if KIND == "int4" else 1.0
    if KIND == "int4":
        a, b = expand_floats(w, NATIVE)
        total = _chunks(a * (16 * low), CHUNK) + _chunks(b * high, CHUNK)
        total -= _chunks(16 * low + high, CHUNK)
        if offset is None:
            total -= 0.5 * _chunks(low + high, CHUNK)
    else:
        total = _chunks(w.to(tl.float32) * low, CHUNK)
    if scale is not None and (GROUPS > 1 or offset is not None):
        chunk = first + tl.arange(0, w.shape[1] // CHUNK) * CHUNK
        total *= _factors(scale, row, chunk, ROW, GROUPS)
        if offset is not None:
            plain = _chunks(low + high if KIND == "int4" else low, CHUNK)
            total += _factors(offset, row, chunk, ROW, GROUPS) * (plain * SIXTEENTH)
    return total


@triton.jit
def _gemv_end(total, scale, offset, bias, row, inverse, GROUPS: tl.constexpr, KIND: tl.constexpr):
    """Sums over chunks, the factors that were left to the end, and the bias: [rows]."""
    y = tl.sum(total, axis=1) * inverse
    if KIND == "int4":
        y *= 16
    if scale is not None and GROUPS == 1 and offset is None:
        y *= tl.load(scale + row).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)
    return y


@triton.jit
def gemv_kernel(
    x, w, scale, offset, norm, bias, residual, out, N, eps,
    K: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, GATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One row x [K] to out [N]. BLOCK_K counts what a row of w stores: bf16 values, or bytes of codes."""
    ROW: tl.constexpr = K // 2 if KIND == "int4" else K
    CHUNK: tl.constexpr = 8 if KIND == "bf16" else 16
    TILES: tl.constexpr = (ROW + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = ROW % BLOCK_K == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    byte = tl.arange(0, BLOCK_K)
    w_gate = weight_tile(w, row, byte, ROW, EVEN)
    w_up = weight_tile(w, row + N, byte, ROW, EVEN) if GATE is not None else w_gate
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.zeros([BLOCK_N, BLOCK_K // CHUNK], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K // CHUNK], tl.float32)
    squares = tl.zeros([1, BLOCK_K // CHUNK], tl.float32)
    for tile in range(TILES):
        first = tile * BLOCK_K
        byte = first + tl.arange(0, BLOCK_K)
        next_gate = weight_tile(w, row, byte + BLOCK_K, ROW, False)
        next_up = weight_tile(w, row + N, byte + BLOCK_K, ROW, False) if GATE is not None else next_gate
        if KIND == "int4":
            k = byte // (UNIT // 2) * UNIT + byte % (UNIT // 2)
            low, low_square = _input_row(x, norm, k, K, False)
            high, high_square = _input_row(x, norm, k + UNIT // 2, K, False)
            square = low_square + high_square
        else:
            low, square = _input_row(x, norm, byte, K, KIND == "bf16")
            high = low
        if norm is not None:
            squares += _chunks(square, CHUNK)
        gate += _gemv_tile(w_gate, low, high, scale, offset, row, first, ROW, GROUPS, KIND, CHUNK, NATIVE)
        if GATE is not None:
            up += _gemv_tile(w_up, low, high, scale, offset, row + N, first, ROW, GROUPS, KIND, CHUNK, NATIVE)
        w_gate, w_up = next_gate, next_up
    inverse = tl.rsqrt(tl.sum(squares) / K + eps) if norm is not None else 1.0
    y = _gemv_end(gate, scale, offset, bias, row, inverse, GROUPS, KIND)
    if GATE is not None:
        y = activate(y, _gemv_end(up, scale, offset, bias, row + N, inverse, GROUPS, KIND), GATE)
    if residual is not None:
        y += tl.load(residual + row).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)
