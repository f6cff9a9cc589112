"""The product of one row, y = x W^T: see `linear.py` for the prologue and epilogue that it shares.

A program multiplies BLOCK_N rows of W element by element, 16 bytes of a row a thread, with the next tile on its way
while it computes; sums cross threads once, at the end. The first tile is asked for before the kernel ahead has ended,
and where LINES says so the others are brought to the second-level cache: attention leaves the memory idle for long.
A thread works at the same columns of all rows, so that many rows share what x costs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.linear_w4 import tiny_part

LINE = tl.constexpr(128)  # bytes that one prefetch brings to the second-level cache


@triton.jit
def prefetch(w, row, first, ROW_BYTES: tl.constexpr, NUM_BYTES: tl.constexpr, LINES: tl.constexpr):
    """Ask for NUM_BYTES bytes of each row from byte `first` on; at most LINES (a power of 2) lines."""
    offset = tl.minimum(first + tl.arange(0, LINES) * LINE, ROW_BYTES - 1)
    offset = tl.minimum(offset, first + NUM_BYTES - 1)
    address = w.to(tl.int64, bitcast=True) + row.to(tl.int64)[:, None] * ROW_BYTES + offset[None, :]
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


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
def _row_tile(x, k, K: tl.constexpr, IS_DENSE: tl.constexpr):
    """A vector at columns k, zero beyond; columns where there is no vector.

    Threads hold it as they hold the weight. Of bf16 weights that is what a load of [1, columns] makes; beside codes it
    is not, and a vector is moved to the threads that need it, where a matrix would draw the codes after it.
    """
    if IS_DENSE:
        k = k[None, :]
    value = k
    if x is not None:
        value = tl.load(x + k, mask=k < K, other=0)
    return value


@triton.jit
def _normed(x, gain, norm, IS_DENSE: tl.constexpr):
    """x times the weight of the norm, if any; and the squares of x. [1, columns]"""
    value = x.to(tl.float32)
    square = value * value
    if norm is not None:
        value *= gain.to(tl.float32)
    if not IS_DENSE:
        value, square = value[None, :], square[None, :]
    return value, square


@triton.jit
def _gemv_tile(
    w, x, scale, offset, row, first, ROW: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """What a tile of the weight adds to the sums of its chunks."""
    total = _chunks(w.to(tl.float32) * x, CHUNK)
    if scale is not None and (GROUPS > 1 or offset is not None):
        chunk = first + tl.arange(0, w.shape[1] // CHUNK) * CHUNK
        total *= _factors(scale, row, chunk, ROW, GROUPS)
        if offset is not None:
            total += _factors(offset, row, chunk, ROW, GROUPS) * _chunks(x, CHUNK)
    return total


@triton.jit
def _gemv_end(total, scale, offset, bias, row, inverse, GROUPS: tl.constexpr, KIND: tl.constexpr):
    """Sums over chunks, the factors that were left to the end, and the bias: [rows]."""
    y = tl.sum(total, axis=1) * inverse
    if KIND == "int4":
        y *= 2.0**49  # see `_codes_tile`
    if scale is not None and GROUPS == 1 and offset is None:
        y *= tl.load(scale + row).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + row).to(tl.float32)
    return y


@triton.jit
def gemv_kernel(
    x, w, scale, offset, norm, bias, residual, out, N, eps,
    K: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, GATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One row x [K] to out [N]. BLOCK_K counts what a row of w stores: bf16 values, or 8-bit codes.

    x, the norm's weight and the residual are asked for as early as they may be: at small sizes the time is what passes
    from the end of the kernel ahead, and every load that waits for another adds to it.
    """
    ROW: tl.constexpr = K
    BYTES: tl.constexpr = 2 if KIND == "bf16" else 1
    CHUNK: tl.constexpr = 8 if KIND == "bf16" else 16
    IS_DENSE: tl.constexpr = KIND == "bf16"
    TILES: tl.constexpr = (ROW + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = ROW % BLOCK_K == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    byte = tl.arange(0, BLOCK_K)
    w_gate = weight_tile(w, row, byte, ROW, EVEN)
    w_up = weight_tile(w, row + N, byte, ROW, EVEN) if GATE is not None else w_gate
    gain = _row_tile(norm, byte, K, IS_DENSE)
    if PDL:
        if LINES > 0:
            FIRST: tl.constexpr = BLOCK_K * BYTES
            prefetch(w, row, FIRST, ROW * BYTES, ROW * BYTES - FIRST, LINES)
            if GATE is not None:
                prefetch(w, row + N, FIRST, ROW * BYTES, ROW * BYTES - FIRST, LINES)
        gdc_wait()
        gdc_launch_dependents()
    value = _row_tile(x, byte, K, IS_DENSE)
    before = tl.load(residual + row) if residual is not None else row
    gate = tl.zeros([BLOCK_N, BLOCK_K // CHUNK], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K // CHUNK], tl.float32)
    squares = tl.zeros([1, BLOCK_K // CHUNK], tl.float32)
    for tile in range(TILES):
        first = tile * BLOCK_K
        byte = first + BLOCK_K + tl.arange(0, BLOCK_K)
        next_gate, next_up, next_value, next_gain = w_gate, w_up, value, gain
        if TILES > 1:
            next_value = _row_tile(x, byte, K, IS_DENSE)
            next_gain = _row_tile(norm, byte, K, IS_DENSE)
            next_gate = weight_tile(w, row, byte, ROW, False)
            next_up = weight_tile(w, row + N, byte, ROW, False) if GATE is not None else next_gate
        factor, square = _normed(value, gain, norm, IS_DENSE)
        if norm is not None:
            squares += _chunks(square, CHUNK)
        gate += _gemv_tile(w_gate, factor, scale, offset, row, first, ROW, GROUPS, CHUNK)
        if GATE is not None:
            up += _gemv_tile(w_up, factor, scale, offset, row + N, first, ROW, GROUPS, CHUNK)
        w_gate, w_up, value, gain = next_gate, next_up, next_value, next_gain
    inverse = tl.rsqrt(tl.sum(squares) / K + eps) if norm is not None else 1.0
    y = _gemv_end(gate, scale, offset, bias, row, inverse, GROUPS, KIND)
    if GATE is not None:
        y = activate(y, _gemv_end(up, scale, offset, bias, row + N, inverse, GROUPS, KIND), GATE)
    if residual is not None:
        y += before.to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _factor(scale, row, column, K: tl.constexpr, GROUPS: tl.constexpr, NATIVE: tl.constexpr):
    """The scales (or offsets) [rows, columns] at these columns.

    Instructions of our own leave the choice of who loads what to the sums that are multiplied; a load of Triton's
    would make them change threads.
    """
    place = row[:, None] * GROUPS + (tl.minimum(column, K - 1) // (K // GROUPS))[None, :]
    if NATIVE:
        address = scale.to(tl.int64, bitcast=True) + place.to(tl.int64) * 4
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [address], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.load(scale + place)


@triton.jit
def _part_of_input(x, norm, word, part: tl.constexpr, K: tl.constexpr):
    """x at the columns of one part of words, times the weight of the norm; and its squares. [1, words]"""
    column = (word // 16 * 128 + part * 16 + word % 16)[None, :]
    value = tl.load(x + column, mask=column < K, other=0).to(tl.float32)
    square = value * value
    if norm is not None:
        value *= tl.load(norm + column, mask=column < K, other=0).to(tl.float32)
    return value, square


@triton.jit
def _scaled(
    sums, plain, scale, offset, row, column, K: tl.constexpr, GROUPS: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Sums of a span of parts over the words of a thread, [rows, words / 4], times 2^-49."""
    plain = _chunks(plain, 4) * 2.0**-49
    total = _chunks(sums, 4)
    if offset is None:
        total -= 8 * plain  # the codes stand for code - 8
    if GROUPS > 1 or offset is not None:
        total *= _factor(scale, row, column, K, GROUPS, NATIVE)
        if offset is not None:
            total += _factor(offset, row, column, K, GROUPS, NATIVE) * plain
    return total


@triton.jit
def _codes_tile(
    x, w_gate, w_up, gate, up, squares, scale, offset, norm, row, N, first,
    K: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr, GATE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Adds a tile of words to the sums: codes as tiny numbers (see `tiny_part`) times large multiples of x."""
    chunk = first + tl.arange(0, w_gate.shape[1] // 4) * 4
    word = first + tl.arange(0, w_gate.shape[1])
    for span in tl.static_range(8 // SPAN):
        gate_sums = tl.zeros(w_gate.shape, tl.float32)
        up_sums = gate_sums
        plain = tl.zeros([1, w_gate.shape[1]], tl.float32)
        for i in tl.static_range(SPAN):
            value, square = _part_of_input(x, norm, word, span * SPAN + i, K)
            if norm is not None:
                squares += square
            plain += value
            codes, up_factor = tiny_part(w_gate, span * SPAN + i)
            value *= up_factor
            gate_sums += codes * value
            if GATE is not None:
                codes, _ = tiny_part(w_up, span * SPAN + i)
                up_sums += codes * value
        column = chunk // 16 * 128 + span * SPAN * 16
        gate += _scaled(gate_sums, plain, scale, offset, row, column, K, GROUPS, NATIVE)
        if GATE is not None:
            up += _scaled(up_sums, plain, scale, offset, row + N, column, K, GROUPS, NATIVE)
    return gate, up, squares


@triton.jit
def gemv_codes_kernel(
    x, w, scale, offset, norm, bias, residual, out, N, eps,
    K: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr, GATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One row x [K] to out [N] for 4-bit codes; BLOCK_K counts words of a row, SPAN the parts that share a scale."""
    ROW: tl.constexpr = (K + 127) // 128 * 16
    TILES: tl.constexpr = (ROW + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = ROW % BLOCK_K == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    word = tl.arange(0, BLOCK_K)
    w_gate = weight_tile(w, row, word, ROW, EVEN)
    w_up = weight_tile(w, row + N, word, ROW, EVEN) if GATE is not None else w_gate
    if PDL:
        if LINES > 0:
            FIRST: tl.constexpr = BLOCK_K * 4
            prefetch(w, row, FIRST, ROW * 4, ROW * 4 - FIRST, LINES)
            if GATE is not None:
                prefetch(w, row + N, FIRST, ROW * 4, ROW * 4 - FIRST, LINES)
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.zeros([BLOCK_N, BLOCK_K // 4], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K // 4], tl.float32)
    squares = tl.zeros([1, BLOCK_K], tl.float32)
    for tile in range(TILES):
        first = tile * BLOCK_K
        next_gate, next_up = w_gate, w_up
        if TILES > 1:
            next_gate = weight_tile(w, row, word + first + BLOCK_K, ROW, False)
            next_up = weight_tile(w, row + N, word + first + BLOCK_K, ROW, False) if GATE is not None else next_gate
        gate, up, squares = _codes_tile(
            x, w_gate, w_up, gate, up, squares, scale, offset, norm, row, N, first, K, GROUPS, SPAN, GATE, NATIVE
        )
        w_gate, w_up = next_gate, next_up
    inverse = tl.rsqrt(tl.sum(squares) / K + eps) if norm is not None else 1.0
    y = _gemv_end(gate, scale, offset, bias, row, inverse, GROUPS, "int4")
    if GATE is not None:
        y = activate(y, _gemv_end(up, scale, offset, bias, row + N, inverse, GROUPS, "int4"), GATE)
    if residual is not None:
        y += tl.load(residual + row).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)
