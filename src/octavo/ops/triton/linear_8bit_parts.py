"""What the kernels of 8-bit products have in common: asking for weights early, and finishing a block of sums."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import runtime
from octavo.ops.triton.scaled import Scaled

COLUMNS = 1024  # of a row, that one program finishes
GROUP = 8  # blocks of rows that are walked over together, so that their operands stay in the second-level cache
ASYNC_COLUMNS = 128  # of K in a tile of the kernel of `linear_int8_async.py`
GLUON = "3.6."  # the release of Triton whose Gluon that kernel is written in: it changes from one to the next


@triton.jit
def prefetch_rows(w, row, first, K: tl.constexpr, SIZE: tl.constexpr):
    """Ask for SIZE bytes of each row from column `first` on, as far as the row goes; nothing is waited for."""
    size = tl.minimum(K - first, SIZE) + tl.zeros_like(row)
    address = (w + row.to(tl.int64) * K + tl.minimum(first, K - 16)).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [address, tl.maximum(size, 16)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def column_factors(w_scale, bias, n, N):
    """The scales of the rows of W, and the bias or zeros, in float32."""
    factor = tl.load(w_scale + n, mask=n < N, other=0)
    shift = tl.zeros_like(factor)
    if bias is not None:
        shift = tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    return factor, shift


@triton.jit
def finish(total, factor, w_factor, shift, residual, out, m, n, M, N):
    """Scale, bias, rounding and residual of a block of sums [rows, columns]."""
    y = total.to(tl.float32) * w_factor[None, :]  # in the order of vLLM's kernels, for the same last bits
    y = y * factor[:, None] + shift[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    y = y.to(out.dtype.element_ty)
    if residual is not None:
        y = (y.to(tl.float32) + tl.load(residual + place, mask=inside, other=0).to(tl.float32)).to(y.dtype)
    tl.store(out + place, y, mask=inside)


@triton.jit
def scales_kernel(
    values, scale, w_scale, bias, residual, out, M, N, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Finishes sums [M, N]; program (row, part of its columns)."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_factor, shift = column_factors(w_scale, bias, n, N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    m = tl.program_id(0) + tl.arange(0, 1)
    total = tl.load(values + m.to(tl.int64)[:, None] * N + n[None, :], mask=(n < N)[None, :], other=0)
    finish(total, tl.load(scale + m), w_factor, shift, residual, out, m, n, M, N)


def apply_scales(y: Scaled, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The numbers that y stands for, plus bias [N], in bfloat16 [M, N]; added to `residual`, if there is one."""
    (rows, n), out = y.values.shape, y.values if residual is None else residual
    pdl = runtime.uses_dependent_launch(out.device)
    if rows > 0:
        scales_kernel[(rows, triton.cdiv(n, COLUMNS))](
            y.values, y.row, y.column, bias, residual, out, rows, n, COLUMNS, pdl, num_warps=4, launch_pdl=pdl
        )
    return out


def takes_async(codes: Tensor) -> bool:
    """Whether the kernel of `linear_int8_async.py` takes these rows: int8, whole tiles of K, where there is Gluon."""
    return codes.dtype == torch.int8 and codes.shape[1] % ASYNC_COLUMNS == 0 and has_async(codes.device)


@functools.cache
def has_async(device: torch.device) -> bool:
    """Whether that kernel compiles for this device: its products are instructions of Hopper alone."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return is_hopper and triton.__version__.startswith(GLUON)
