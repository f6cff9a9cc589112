"""RMS norms that are launched alike for every number of rows, so that a row's squares are summed in one order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import runtime

MAX_WIDTH = 1 << 16


@triton.jit
def fixed_norm_kernel(
    x, residual, weight, out, width, x_stride, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """RMS norm of a row of x, or of residual + x where there is a residual, which gets that sum."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0)
    if residual is not None:
        place = residual + row * width + column
        value = (value.to(tl.float32) + tl.load(place, mask=inside, other=0).to(tl.float32)).to(value.dtype)
        tl.store(place, value, mask=inside)
    y = value.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y) / width + eps) * gain
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    rows, width = flat.shape
    if rows:
        block = triton.next_power_of_2(width)
        pdl = runtime.uses_dependent_launch(x.device)
        # A row alone has an undefined stride in torch, and Triton compiles by what divides it.
        stride = flat.stride(0) if rows > 1 else width
        fixed_norm_kernel[(rows,)](
            flat, residual, weight, out, width, stride, eps, block, pdl,
            num_warps=max(1, min(8, block // 256)), launch_pdl=pdl, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """See `octavo.ops.rms_norm`."""
    if x.shape[-1] > MAX_WIDTH or (out is not None and not out.is_contiguous()):
        return NotImplemented
    return _norm(x, None, weight, eps, torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo.ops.add_rms_norm`."""
    if x.shape[-1] > MAX_WIDTH or not residual.is_contiguous() or residual.dtype != x.dtype:
        return NotImplemented
    return _norm(x, residual, weight, eps, torch.empty(x.shape, dtype=x.dtype, device=x.device))
