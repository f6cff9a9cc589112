"""Products of a few rows with 4-bit codes in `few_rows_w4.cu`: which weights it takes, and with which sizes."""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.ops.cuda import compiler
from octavo.ops.triton import runtime

MOST_ROWS = 16  # from there on Triton's kernel is as fast: the larger products of wgmma make good for what it wastes
NORMED_ROWS = 8  # with a norm, more rows cost more instructions than a launch of its own costs time
_UNIT = 128  # columns
_ACTIVATIONS = {None: 0, "silu": 0, "gelu_tanh": 1}
_STEPS_A_GROUP = {32: 2, 64: 4}  # of 16 columns; larger groups count as one unit
_UNIT_GROUPS = {_UNIT << shift: shift for shift in range(12)}


class Weight(Protocol):
    """4-bit codes as `octavo.ops.triton.weights` keeps them."""

    shape: tuple[int, int]
    kind: str
    groups: int
    data: Tensor
    scale: Tensor | None
    offset: Tensor | None


class Sizes(NamedTuple):
    """Tiles of 8 rows of x, tiles of 16 rows of W a warp, warps along rows, warps along K, units that a warp has asked
    for, units a chunk of x (a multiple of the last two), parts of K."""

    nt: int
    mt: int
    rw: int
    kw: int
    ahead: int
    chunk: int
    parts: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.rw * self.kw

    @property
    def rows(self) -> int:
        """Of W that a block takes."""
        return 16 * self.mt * self.rw

    @property
    def shared_bytes(self) -> int:
        """Two chunks of x and of a norm, or the sums in their place."""
        inputs = 2 * (8 * self.nt + 1) * (self.chunk * _UNIT + 16) * 2
        return max(inputs, 8 * self.nt * (self.rows + 4 + 4 * self.kw) * 4)


def rejects(weight: Weight) -> str | None:
    """Why the kernel does not serve a weight, or None."""
    columns = weight.shape[1]
    group = columns // weight.groups
    if weight.kind != "int4" or weight.offset is not None:
        return "serves symmetric 4-bit codes"
    if columns % _UNIT:
        return f"{columns} columns are no multiple of {_UNIT}"
    if weight.groups > 1 and group not in _STEPS_A_GROUP and group not in _UNIT_GROUPS:
        return f"groups of {group} are neither 32, 64 nor a power of two from {_UNIT} on"
    return compiler.unavailable()


def steps_a_group(columns: int, groups: int) -> int:
    """The macro GJ: steps of 16 columns that share a scale, at most those of a unit; 0 for one scale a row."""
    return 0 if groups == 1 else _STEPS_A_GROUP.get(columns // groups, 8)


def group_shift(columns: int, groups: int) -> int:
    """log2 of the units that share a scale, 0 where a unit has several or all of a row share one."""
    return _UNIT_GROUPS.get(columns // groups, 0)


def sizes_for(rows: int, n: int, columns: int, multiprocessors: int) -> Sizes:
    """Sizes for `rows` of x and a weight with `n` rows in all: two blocks a multiprocessor, equal parts of K.

    Measured on an H200 with `benchmarks/gpu_w4.py` (2026-11-30); other blocks gained 3 % at most for some shapes.
    """
    mt, rw, kw, ahead = 2, 4, 2, 2
    tiles, units = -(-n // (16 * mt * rw)), columns // _UNIT
    most = max(1, min(2 * multiprocessors // tiles, units // (kw * ahead)))
    parts = next(parts for parts in range(most, 0, -1) if units % parts == 0)
    return Sizes(1 if rows <= 8 else 2, mt, rw, kw, ahead, kw * ahead, parts)


def few_rows(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    norm: Tensor | None,
    eps: float,
    gate: str | None,
    residual: Tensor | None,
    early: bool,
    sizes: Sizes | None = None,
) -> Tensor:
    """residual + gate(rms_norm(x) W^T + bias) as `octavo.ops.triton.linear.few_rows`; x [M, K] bf16, few rows."""
    rows, k = x.shape
    n = weight.shape[0] if gate is None else weight.shape[0] // 2
    if sizes is None:
        sizes = sizes_for(rows, weight.shape[0], k, runtime.num_multiprocessors(x.device))
    width = sizes.rows if gate is None else sizes.rows // 2
    tiles, units = -(-n // width), k // _UNIT
    out = torch.empty((rows, n), dtype=out_dtype, device=x.device)
    partial = counters = None
    if sizes.parts > 1:
        partial = torch.empty(
            tiles * sizes.parts * 8 * sizes.nt * (sizes.rows + 1), dtype=torch.float32, device=x.device
        )
        counters = runtime.counters(x.device, tiles)
    kernel = _kernel(
        sizes, steps_a_group(k, weight.groups), norm is not None, gate is not None, out_dtype == torch.float32
    )
    tensors = (x, weight.data, weight.scale, norm, bias, residual, out, partial, counters)
    shift, part = group_shift(k, weight.groups), -(-units // sizes.parts)
    numbers = (rows, n, k, weight.groups, shift, part, _ACTIVATIONS[gate], float(eps), int(early))
    kernel.launch((tiles, sizes.parts, 1), (*tensors, *numbers), x.device, early)
    return out


def macros(sizes: Sizes, group_steps: int, normed: bool, gated: bool, out_float: bool) -> dict[str, int]:
    """What the kernel is compiled with."""
    names = {"NT": sizes.nt, "MT": sizes.mt, "RW": sizes.rw, "KW": sizes.kw, "AHEAD": sizes.ahead}
    names["CHUNK"] = sizes.chunk
    return names | {"GJ": group_steps, "NORMED": int(normed), "GATED": int(gated), "OUT_FLOAT": int(out_float)}


@functools.cache
def _kernel(sizes: Sizes, group_steps: int, normed: bool, gated: bool, out_float: bool) -> compiler.Kernel:
    sizes = sizes._replace(parts=1)  # not compiled in
    return compiler.load(
        "few_rows_w4", macros(sizes, group_steps, normed, gated, out_float), sizes.threads, sizes.shared_bytes
    )
