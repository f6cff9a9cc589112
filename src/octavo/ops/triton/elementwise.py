"""Norms and gated activations, alone or rounded to 8 bits in the same pass; one program a row.

A row stays in registers, so each number is read once. What is rounded to 8 bits comes straight from float32: nearer to
the exact result than by way of the input's dtype. Inputs may be products whose scales are still to be applied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import runtime
from octavo.ops.triton.quantize import ALONE, codes_of, empty_codes, row_launch, row_scale, store_codes
from octavo.ops.triton.scaled import Scaled, parts

MAX_WIDTH = 1 << 16  # a wider row does not fit the registers of a program
PART = 2048  # columns a program of a gated activation that nobody quantizes


@triton.jit
def norm_kernel(
    x, x_row, x_column, residual, weight, out, scale, width, x_stride, eps,
    BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """RMS norm of a row of x, or of residual + x where there is a residual, which gets that sum.

    x_row, x_column: scales of the rows and columns of x, or None.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0)  # of the model, as x_column: no kernel ahead writes it
    if x_column is not None:
        factor = tl.load(x_column + column, mask=inside, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0)
    if x_row is not None:
        value = value.to(tl.float32) * factor * tl.load(x_row + row)
    if residual is not None:
        place = residual + row * width + column
        total = value.to(tl.float32) + tl.load(place, mask=inside, other=0).to(tl.float32)
        value = total.to(residual.dtype.element_ty)
        tl.store(place, value, mask=inside)
    y = value.to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y) / width + eps)
    y *= gain.to(tl.float32)
    if KIND is None:
        tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)
    else:
        store_codes(y, out, scale, row, column, inside, width, KIND, NATIVE)


@triton.jit
def _activate(gate, up, GATE: tl.constexpr, NATIVE: tl.constexpr):
    """silu(gate) * up, or GELU with its tanh approximation: 0.5 (1 + tanh(z)) is sigmoid(2 z).

    exp and the division come straight from the hardware's approximations, within 2 units in the last place: with what
    the compiler puts around them for denormal numbers, a rounded row took longer to compute than to read.
    """
    if GATE == "silu":
        z = gate
    else:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    if NATIVE:
        sigmoid = tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }""",
            "=f,f",
            [z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        sigmoid = 1 / (1 + tl.exp(-z))
    return gate * sigmoid * up


@triton.jit
def _round(y, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """y (float32) in `dtype`; bfloat16 two at a time, since the compiler takes a slow instruction for single ones."""
    if NATIVE and dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [y], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        y = y.to(dtype)
    return y


@triton.jit
def _gated_part(
    x, x_row, x_column, row, column, inside, width, x_stride, GATE: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Columns of an activated row, in float32."""
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0).to(tl.float32)
    if x_row is not None:
        factor = tl.load(x_row + row)
        gate *= tl.load(x_column + column, mask=inside, other=0) * factor
        up *= tl.load(x_column + width + column, mask=inside, other=0) * factor
    return _activate(gate, up, GATE, NATIVE)


@triton.jit
def gate_kernel(
    x, x_row, x_column, out, scale, width, x_stride,
    BLOCK: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """activation(x[:width]) * x[width:] of a row; program (row, part of its columns). Scales as in `norm_kernel`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    y = _gated_part(x, x_row, x_column, row, column, inside, width, x_stride, GATE, NATIVE)
    if KIND is None:
        tl.store(out + row * width + column, _round(y, out.dtype.element_ty, NATIVE), mask=inside)
    else:
        store_codes(y, out, scale, row, column, inside, width, KIND, NATIVE)


@triton.jit
def _largest_gated(
    x, x_row, x_column, row, part, width, x_stride, largest, BLOCK: tl.constexpr, GATE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The elementwise maximum of `largest` and the magnitudes of one part of an activated row; and the part itself."""
    column = part * BLOCK + tl.arange(0, BLOCK)
    y = _gated_part(x, x_row, x_column, row, column, column < width, width, x_stride, GATE, NATIVE)
    return tl.maximum(largest, tl.abs(y)), y


@triton.jit
def gate_parts_kernel(
    x, x_row, x_column, out, scale, width, x_stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The codes of one part of an activated row. Every program of a row finds the largest magnitude of all of it.

    For few rows: one multiprocessor takes longer to round a wide row than several take to look at all of it.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1)
    largest, y = _largest_gated(
        x, x_row, x_column, row, mine, width, x_stride, tl.zeros([BLOCK], tl.float32), BLOCK, GATE, NATIVE
    )
    for i in tl.static_range(1, PARTS):
        part = (mine + i) % PARTS
        largest, _ = _largest_gated(
            x, x_row, x_column, row, part, width, x_stride, largest, BLOCK, GATE, NATIVE
        )  # fmt: skip
    factor = row_scale(tl.max(largest), KIND)
    column = mine * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * width + column, codes_of(y, factor, KIND, NATIVE), mask=column < width)
    tl.store(scale + row, factor, mask=mine == 0)


def _rows(x: Tensor) -> Tensor:
    """x as [T, W] with neighbouring columns side by side."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _norm(
    x: Tensor | Scaled, residual: Tensor | None, weight: Tensor, eps: float, kind: str | None, out: Tensor,
    scale: Tensor | None,
) -> None:  # fmt: skip
    x, x_row, x_column = parts(x)
    rows, width = x.shape
    if rows == 0:
        return
    block, warps = row_launch(width, rows <= ALONE)
    pdl = runtime.uses_dependent_launch(x.device)
    norm_kernel[(rows,)](
        x, x_row, x_column, residual, weight, out, scale, width, x.stride(0), eps, block, kind, pdl,
        runtime.is_native(), num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip


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
    x: Tensor | Scaled, residual: Tensor | None, weight: Tensor, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` (`rms_norm` where residual is None) in float32, then `reference.quantize_rows`.

    x [T, K], residual contiguous and updated in place: the norm is that of the sum as it is rounded there. Returns
    codes [T, K] of `kind`, "int8" or "fp8", and float32 scales [T, 1].
    """
    x = x if isinstance(x, Scaled) else _rows(x)
    values = parts(x)[0]
    codes, scale = empty_codes(values.shape[0], values.shape[1], kind, values.device)
    _norm(x, residual, weight, eps, kind, codes, scale)
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
            x, None, None, out, None, width, x.stride(0), block, gate, None, pdl, runtime.is_native(),
            num_warps=max(1, block // 512), launch_pdl=pdl,
        )  # fmt: skip
    return out


def gated_quant(x: Tensor | Scaled, gate: str, kind: str) -> tuple[Tensor, Tensor]:
    """`silu_mul` or `gelu_tanh_mul` of x [T, 2 I] in float32, then `reference.quantize_rows`.

    gate: "silu" or "gelu_tanh". Returns codes [T, I] of `kind`, "int8" or "fp8", and float32 scales [T, 1].
    """
    x, x_row, x_column = parts(x)
    x = _rows(x)
    rows, width = x.shape[0], x.shape[1] // 2
    codes, scale = empty_codes(rows, width, kind, x.device)
    if rows == 0:
        return codes, scale
    pdl = runtime.uses_dependent_launch(x.device)
    slices = triton.cdiv(width, PART)
    arguments = (x, x_row, x_column, codes, scale, width, x.stride(0))
    constants = (gate, kind, pdl, runtime.is_native())
    if slices > 1 and rows * slices <= ALONE:
        gate_parts_kernel[(rows, slices)](*arguments, slices, PART, *constants, num_warps=8, launch_pdl=pdl)
    else:
        block, warps = row_launch(width, rows <= ALONE)
        gate_kernel[(rows, 1)](*arguments, block, *constants, num_warps=warps, launch_pdl=pdl)
    return codes, scale
