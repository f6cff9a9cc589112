"""Rows of numbers to 8-bit codes with a scale a row: `reference.quantize_rows`, bit by bit."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import runtime

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ALONE = 132  # up to about so many rows, a row has a multiprocessor to itself

_TINY = tl.constexpr(1.1754943508222875e-38)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: added, it leaves a whole number in the low bits, ties to even


@triton.jit
def row_scale(largest, KIND: tl.constexpr):
    """The scale of a row whose largest magnitude is given."""
    LARGEST: tl.constexpr = 448.0 if KIND == "fp8" else 127.0
    return tl.maximum(tl.math.div_rn(largest, LARGEST), _TINY)


@triton.jit
def codes_of(y, factor, KIND: tl.constexpr, NATIVE: tl.constexpr, CLAMP: tl.constexpr = False):
    """The codes of numbers y (float32). Under the scale of their row, no quotient rounds past the largest code.

    The quotient is the one of an IEEE division: the reciprocal's product, corrected twice by its exact remainder
    (P. Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). One reciprocal
    a row instead of one a number: a division each took as long as reading the row.
    """
    if NATIVE:
        inverse = tl.math.div_rn(1.0, factor)
        quotient = y * inverse
        quotient = tl.fma(tl.fma(-quotient, factor, y), inverse, quotient)
        quotient = tl.fma(tl.fma(-quotient, factor, y), inverse, quotient)
    else:
        quotient = tl.math.div_rn(y, factor)
    if CLAMP:
        LOW: tl.constexpr = -448.0 if KIND == "fp8" else -128.0
        HIGH: tl.constexpr = 448.0 if KIND == "fp8" else 127.0
        quotient = tl.minimum(tl.maximum(quotient, LOW), HIGH)
    if KIND == "fp8":
        return quotient.to(tl.float8e4nv)
    else:
        return (quotient + _ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def store_codes(y, codes, scale, row, column, inside, width, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Write the codes of a row y (0 outside) and its scale."""
    y = y.to(tl.float32)
    factor = row_scale(tl.max(tl.abs(y)), KIND)
    tl.store(codes + row * width + column, codes_of(y, factor, KIND, NATIVE), mask=inside)
    tl.store(scale + row, factor)


@triton.jit
def quantize_kernel(
    x, codes, scale, fixed, width, x_stride,
    BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A row of x to codes, under the scale `fixed` where there is one."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    y = tl.load(x + row * x_stride + column, mask=inside, other=0)
    if fixed is not None:
        code = codes_of(y.to(tl.float32), fixed, KIND, NATIVE, True)
        tl.store(codes + row * width + column, code, mask=inside)
        tl.store(scale + row, fixed)
    else:
        store_codes(y, codes, scale, row, column, inside, width, KIND, NATIVE)


def empty_codes(rows: int, width: int, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for codes [rows, width] and float32 scales [rows, 1]."""
    codes = torch.empty((rows, width), dtype=CODE_DTYPES[kind], device=device)
    return codes, torch.empty((rows, 1), dtype=torch.float32, device=device)


@functools.cache
def row_launch(width: int, is_alone: bool) -> tuple[int, int]:
    """(columns of a program, warps) for a whole row: 8 numbers a thread where a row is alone, 32 where many wait."""
    block = triton.next_power_of_2(width)
    return block, max(1, min(32, block // 256) if is_alone else min(16, block // 512))


def quantize_rows(x: Tensor, kind: str, fixed: float | None = None) -> tuple[Tensor, Tensor]:
    """`reference.quantize_rows` of x [T, K]: codes [T, K], int8 or float8_e4m3fn, and float32 scales [T, 1]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = x.shape
    codes, scale = empty_codes(rows, width, kind, x.device)
    if rows > 0:
        block, warps = row_launch(width, rows <= ALONE)
        pdl = runtime.uses_dependent_launch(x.device)
        quantize_kernel[(rows,)](
            x,
            codes,
            scale,
            fixed,
            width,
            x.stride(0),
            block,
            kind,
            pdl,
            runtime.is_native(),
            num_warps=warps,
            launch_pdl=pdl,
        )
    return codes, scale
