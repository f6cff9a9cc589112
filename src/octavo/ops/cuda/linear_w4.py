"""Products of a few rows with 4-bit codes in `few_rows_w4.cu`: which weights it takes, and with which sizes."""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.ops.cuda import compiler
from octavo.ops.triton import runtime

MOST_ROWS = 16  # from there on Triton's kernel is as fast: the larger products of wgmma make good for what it wastes
_UNIT = 128  # columns
_UNIT_BYTES, _INPUT_BYTES = 64, 256  # of a row of W and of a row of x
_MOST_COLUMNS = 1 << 16  # of which a sixteenth fits into a block with any number of rows
_BOX_ROWS = 16  # of W that one copy brings
_SHARED = 226 << 10  # bytes of a block on Hopper, less what the kernel declares itself
_WARPS = 8
_ACTIVATIONS = {None: 0, "silu": 0, "gelu_tanh": 1}
_SCALES_A_UNIT = {32: 4, 64: 2}  # by columns of a group; larger groups count as units


class Weight(Protocol):
    """4-bit codes as `octavo.ops.triton.weights` keeps them, and their scales as `pack_scales` orders them."""

    shape: tuple[int, int]
    kind: str
    groups: int
    data: Tensor
    scale: Tensor | None
    offset: Tensor | None
    unit_scales: Tensor | None


class Sizes(NamedTuple):
    """Tiles of 16 rows of W a pass, warps that multiply, stages of the ring, blocks along W, parts of K."""

    mt: int
    kw: int
    stages: int
    blocks: int
    parts: int


class Shape(NamedTuple):
    """What the kernel is compiled for: rows of x, rows of W in all, units of 128 columns, scales a unit, norm, gate."""

    rows: int
    n: int
    units: int
    scales: int
    normed: bool
    gated: bool

    @property
    def tiles(self) -> int:
        """Of 4 rows of x: few different numbers, since each is a kernel of its own."""
        return next(tiles for tiles in (1, 2, 4) if self.rows <= 4 * tiles)

    @property
    def room(self) -> int:
        """Rows of x that there is room for."""
        return 1 if self.rows == 1 else 4 * self.tiles

    def passes(self, sizes: Sizes) -> int:
        """Of a block, at most: mt tiles of W, or half of them and what they gate."""
        tiles, a_pass = (self.n // 32, sizes.mt // 2) if self.gated else (self.n // 16, sizes.mt)
        of_a_block = -(-tiles // sizes.blocks)
        return -(-of_a_block // a_pass)

    def units_a_part(self, sizes: Sizes) -> int:
        """Of K."""
        return -(-self.units // sizes.parts)

    def stage_bytes(self, sizes: Sizes) -> int:
        """Of a ring's stage: its boxes and their scales, in whole lines."""
        return -(-sizes.mt * sizes.kw * (_BOX_ROWS * _UNIT_BYTES + 64 * self.scales) // 128) * 128

    def shared_bytes(self, sizes: Sizes) -> int:
        """Of a block: the ring, two passes' sums, x and its scales, the weights of a norm."""
        units = self.units_a_part(sizes)
        sums = 2 * sizes.kw * self.room * (16 * sizes.mt + 4) * 4
        inputs = self.room * units * _INPUT_BYTES + -(-self.room * units // 4) * 16
        return (
            sizes.stages * self.stage_bytes(sizes) + sums + inputs + (self.units * _INPUT_BYTES if self.normed else 0)
        )

    def macros(self, sizes: Sizes, out_float: bool) -> dict[str, int]:
        """What the kernel is compiled with."""
        names = {"NT": self.tiles, "X_ROWS": self.room, "MT": sizes.mt, "KW": sizes.kw, "STAGES": sizes.stages}
        names |= {"SPU": self.scales, "NORMED": int(self.normed), "GATED": int(self.gated)}
        return names | {"OUT_FLOAT": int(out_float)}


def rejects(weight: Weight) -> str | None:
    """Why the kernel does not serve a weight, or None."""
    n, columns = weight.shape
    group = columns // weight.groups
    if weight.kind != "int4" or weight.offset is not None:
        return "serves symmetric 4-bit codes"
    if n % 32 or columns % _UNIT:
        return f"{n} rows are no multiple of 32, or {columns} columns none of {_UNIT}"
    if columns > _MOST_COLUMNS:
        return f"{columns} columns are more than {_MOST_COLUMNS}"
    if weight.groups > 1 and group not in _SCALES_A_UNIT and group % _UNIT:
        return f"groups of {group} are neither 32, 64 nor a multiple of {_UNIT}"
    return compiler.unavailable()


def pack_scales(scale: Tensor, columns: int) -> Tensor | None:
    """Scales [N, groups] as [N / 16, units, scales a unit, 16]: those of a box together. None for one scale a row."""
    n, groups = scale.shape
    if groups == 1:
        return None
    units, a_unit = columns // _UNIT, _SCALES_A_UNIT.get(columns // groups, 1)
    each = scale.float().repeat_interleave(units * a_unit // groups, dim=1)
    return each.view(n // 16, 16, units, a_unit).permute(0, 2, 3, 1).contiguous()


@functools.cache
def sizes_for(shape: Shape, multiprocessors: int) -> Sizes | None:
    """A block a multiprocessor, K in as few parts as leave a ring of two stages; None where no parts do.

    Four tiles of W a pass where a block has more than two and registers allow it, since x is read once a pass; a ring
    as large as there is room. Measured on an H200 with `benchmarks/gpu_w4.py` (2026-11-30).
    """
    for parts in (1,) if shape.normed else (1, 2, 4, 8, 16):
        if -(-shape.units // -(-shape.units // parts)) != parts:
            continue  # a part would be empty
        blocks = max(1, min(multiprocessors // parts, shape.n // (32 if shape.gated else 16)))
        many = shape.n > 2 * _BOX_ROWS * blocks and max(1, shape.scales) * shape.tiles <= 4
        for mt in (4, 2) if many else (2,):
            sizes = Sizes(mt, min(_WARPS, shape.units), 0, blocks, parts)
            room = (_SHARED - shape.shared_bytes(sizes)) // shape.stage_bytes(sizes)
            needed = max(2, shape.passes(sizes) * -(-shape.units_a_part(sizes) // sizes.kw))
            if room >= 2:
                return sizes._replace(stages=min(room, needed, 16))
    return None


def shape_of(rows: int, weight: Weight, normed: bool, gated: bool) -> Shape:
    """The problem that `few_rows` solves."""
    scales = 0 if weight.unit_scales is None else weight.unit_scales.shape[2]
    return Shape(rows, weight.shape[0], weight.shape[1] // _UNIT, scales, normed, gated)


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
    rows = x.shape[0]
    n = weight.shape[0] if gate is None else weight.shape[0] // 2
    shape = shape_of(rows, weight, norm is not None, gate is not None)
    if sizes is None:
        sizes = sizes_for(shape, runtime.num_multiprocessors(x.device))
        assert sizes is not None, "a norm needs `takes`"
    out = torch.empty((rows, n), dtype=out_dtype, device=x.device)
    partial = counters = None
    if sizes.parts > 1:
        jobs = sizes.blocks * shape.passes(sizes)
        partial = torch.empty(jobs * sizes.parts * rows * sizes.mt * 16, dtype=torch.float32, device=x.device)
        counters = runtime.counters(x.device, jobs)
    kernel = _kernel(shape._replace(rows=shape.room), sizes, out_dtype == torch.float32)
    row_bytes = shape.units * _UNIT_BYTES
    boxes = compiler.tensor_map(weight.data.data_ptr(), weight.shape[0], row_bytes, sizes.kw * _UNIT_BYTES, _BOX_ROWS)
    row_scale = weight.scale if weight.unit_scales is None else None
    tensors = (x, weight.unit_scales, row_scale, norm, bias, residual, out, partial, counters)
    numbers = (rows, n, shape.units, shape.units_a_part(sizes), _ACTIVATIONS[gate], float(eps), int(early))
    kernel.launch((sizes.blocks, sizes.parts, 1), (boxes, *tensors, *numbers), x.device, early)
    return out


def takes(rows: int, weight: Weight, normed: bool, gated: bool, multiprocessors: int) -> bool:
    """Whether there are sizes for a product; with a norm x has to fit into a block as a whole."""
    return sizes_for(shape_of(rows, weight, normed, gated), multiprocessors) is not None


@functools.cache
def _kernel(shape: Shape, sizes: Sizes, out_float: bool) -> compiler.Kernel:
    macros = shape.macros(sizes, out_float)
    return compiler.load("few_rows_w4", macros, 32 * (sizes.kw + 1), shape.shared_bytes(sizes))
