"""Norms and gated activations, alone or rounded to 8 bits in the same pass; one program a row.

A row stays in registers, so each number is read once. The norm is rounded to the dtype of its input before it is
quantized, as the separate operations do it, so that both ways give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import runtime
from octavo.ops.triton.gemv import activate
from octavo.ops.triton.quantize import empty_codes, row_launch, store_codes

MAX_WIDTH = 1 << 16  # a wider row does not fit the registers of a program
PART = 2048  # columns a program of a gated activation that nobody quantizes


@triton.jit
def norm_kernel(
    x, residual, weight, out, scale, width, x_stride, eps,
    BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RMS norm of a row of x, or of residual + x where there is a residual, which gets that sum."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0)
    if residual is not None:
        place = residual + row * width + column
        value = (value.to(tl.float32) + tl.load(place, mask=inside, other=0).to(tl.float32)).to(value.dtype)
        tl.store(place, value, mask=inside)
    y = value.to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y) / width + eps)
    y *= tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if KIND is None:
        tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)
    else:
        store_codes(y.to(value.dtype).to(tl.float32), out, scale, row, column, inside, width, KIND)


@triton.jit
def gate_kernel(
    x, out, scale, width, x_stride, BLOCK: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr
):
    """activation(x[:width]) * x[width:] of a row; program (row, part of its columns)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0)
    y = activate(gate.to(tl.float32), up.to(tl.float32), GATE).to(gate.dtype)
    if KIND is None:
        tl.store(out + row * width + column, y, mask=inside)
    else:
        store_codes(y.to(tl.float32), out, scale, row, column, inside, width, KIND)


def _rows(x: Tensor) -> Tensor:
    """x as [T, W] with neighbouring columns side by side."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, kind: str | None, out: Tensor, scale: Tensor | None
) -> None:
    rows, width = x.shape
    if rows == 0:
        return
    block, warps = row_launch(width)
    pdl = runtime.uses_dependent_launch(x.device)
    norm_kernel[(rows,)](
        x, residual, weight, out, scale, width, x.stride(0), eps, block, kind, pdl, num_warps=warps, launch_pdl=pdl
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """See `octavo.ops.rms_norm`."""
    if x.shape[-1] > MAX_WIDTH or (out is not None and not out.is_contiguous()):
        return NotImplemented
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(_rows(x), None, weight, eps, None, out, None)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo.ops.add_rms_norm`."""
    if x.shape[-1] > MAX_WIDTH or not residual.is_contiguous() or residual.dtype != x.dtype:
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(_rows(x), residual, weight, eps, None, out, None)
    return out


def add_rms_norm_quant(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` (`rms_norm` where residual is None), then `reference.quantize_rows`; the same bits.

    x [T, K], residual contiguous and updated in place. Returns codes [T, K] of `kind`, "int8" or "fp8", and float32
    scales [T, 1].
    """
    codes, scale = empty_codes(x.shape[0], x.shape[1], kind, x.device)
    _norm(_rows(x), residual, weight, eps, kind, codes, scale)
    return codes, scale


def silu_mul(x: Tensor) -> Tensor:
    """See `octavo.ops.silu_mul`."""
    return _gated(x, "silu")


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """See `octavo.ops.gelu_tanh_mul`."""
    return _gated(x, "gelu_tanh")


def _gated(x: Tensor, gate: str) -> Tensor:
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    x = _rows(x)
    block = min(PART, triton.next_power_of_2(width))
    if x.shape[0] > 0:
        pdl = runtime.uses_dependent_launch(x.device)
        gate_kernel[(x.shape[0], triton.cdiv(width, block))](
            x, out, None, width, x.stride(0), block, gate, None, pdl, num_warps=max(1, block // 512), launch_pdl=pdl
        )
    return out


def silu_mul_quant(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """`silu_mul` of x [T, 2 I], then `reference.quantize_rows`, with the same bits: codes [T, I] and scales [T, 1]."""
    return gated_quant(x, "silu", kind)


def gated_quant(x: Tensor, gate: str, kind: str) -> tuple[Tensor, Tensor]:
    """The same for the activation `gate`, "silu" or "gelu_tanh"."""
    x = _rows(x)
    rows, width = x.shape[0], x.shape[1] // 2
    codes, scale = empty_codes(rows, width, kind, x.device)
    if rows > 0:
        block, warps = row_launch(width)
        pdl = runtime.uses_dependent_launch(x.device)
        gate_kernel[(rows, 1)](
            x, codes, scale, width, x.stride(0), block, gate, kind, pdl, num_warps=warps, launch_pdl=pdl
        )
    return codes, scale
