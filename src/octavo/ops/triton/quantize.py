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

_TINY = tl.constexpr(1.1754943508222875e-38)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it leaves a whole number, ties to even


@triton.jit
def store_codes(y, codes, scale, row, column, inside, width, KIND: tl.constexpr):
    """Write the codes of a row y (float32, 0 outside) and its scale."""
    LARGEST: tl.constexpr = 448.0 if KIND == "fp8" else 127.0
    factor = tl.maximum(tl.math.div_rn(tl.max(tl.abs(y)), LARGEST), _TINY)
    quotient = tl.math.div_rn(y, factor)
    if KIND == "fp8":
        code = tl.minimum(tl.maximum(quotient, -448.0), 448.0).to(tl.float8e4nv)
    else:
        whole = (tl.minimum(tl.maximum(quotient, -128.0), 127.0) + _ROUND) - _ROUND
        code = whole.to(tl.int8)
    tl.store(codes + row * width + column, code, mask=inside)
    tl.store(scale + row, factor)


@triton.jit
def quantize_kernel(x, codes, scale, width, x_stride, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """A row of x to codes."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    y = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    store_codes(y, codes, scale, row, column, inside, width, KIND)


def empty_codes(rows: int, width: int, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for codes [rows, width] and float32 scales [rows, 1]."""
    codes = torch.empty((rows, width), dtype=CODE_DTYPES[kind], device=device)
    return codes, torch.empty((rows, 1), dtype=torch.float32, device=device)


@functools.cache
def row_launch(width: int) -> tuple[int, int]:
    """(columns of a program, warps) for a whole row: up to 32 numbers a thread, then more."""
    block = triton.next_power_of_2(width)
    return block, max(1, min(16, block // 512))


def quantize_rows(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """`reference.quantize_rows` of x [T, K]: codes [T, K], int8 or float8_e4m3fn, and float32 scales [T, 1]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = x.shape
    codes, scale = empty_codes(rows, width, kind, x.device)
    if rows > 0:
        block, warps = row_launch(width)
        pdl = runtime.uses_dependent_launch(x.device)
        quantize_kernel[(rows,)](x, codes, scale, width, x.stride(0), block, kind, pdl, num_warps=warps, launch_pdl=pdl)
    return codes, scale
