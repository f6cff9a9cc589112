"""Weights in the tiles that linear.cpp reads: 16 output rows a tile, the factors of one instruction side by side."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.cpu import library
from octavo.ops.packed_weight import PackedWeight, QuantizedWeightLike, quantizes_input

TILE = 16
BF16, INT4, INT8, W8A8 = range(4)
NEVER = 2**31 - 1
# With AVX-512, from this many rows on, expanding a tile to bf16 once costs less than decoding it for each block of
# rows; and matrix tiles beat vectors. Measured on 2 cores of a Xeon with AMX, K = 576 and 1536, by ops_cpu.py.
EXPAND_FROM = 65
AMX_FROM = {BF16: 3, INT4: 13, INT8: 13, W8A8: 5}
MAX_GROUP = 128
STEP = {4: 8, 8: 4}  # values of k in 64 bytes of a tile, by bits


class _WeightStruct(ctypes.Structure):
    """Mirrors `struct Weight` of linear.cpp."""

    _fields_ = (
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("tile_bytes", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("has_offset", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("expand_from", ctypes.c_int32),
        ("amx_from", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


class CpuWeight(PackedWeight):
    """A weight in tiles; `data` uint8 [tiles, bytes of a tile]."""

    def __init__(
        self,
        shape: tuple[int, int],
        kind: int,
        data: Tensor,
        *,
        group: int = 0,
        row_scale: Tensor | None = None,
        has_offset: bool = False,
        zero: int = 0,
    ) -> None:
        self.name = "cpu " + ("bf16", "int4", "int8", "int8 x int8")[kind]
        self.shape = shape
        self.data = data
        self.row_scale = row_scale
        # A tile register takes 64 bytes of a row of x: 32 bf16 or 64 int8 values.
        fits_amx = library.level() >= 3 and shape[1] % (64 if kind == W8A8 else 32) == 0
        amx_from = AMX_FROM[kind] if fits_amx else NEVER
        self._struct = _WeightStruct(
            n=shape[0],
            k=shape[1],
            group=group,
            tile_bytes=data.shape[1],
            data=data.data_ptr(),
            row_scale=None if row_scale is None else row_scale.data_ptr(),
            kind=kind,
            has_offset=has_offset,
            zero=zero,
            expand_from=min(EXPAND_FROM, amx_from) if kind in (INT4, INT8) else 0,
            amx_from=amx_from,
        )
        self.address = ctypes.addressof(self._struct)
        cpu_library = library.load()[0]
        assert cpu_library is not None
        self._linear: Any = cpu_library.octavo_linear
        self._rows: Any = cpu_library.octavo_rows

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.row_scale is None else self.row_scale.nbytes)

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        rows, columns = x.shape
        if columns != self.shape[1]:
            raise ValueError(f"linear: x has {columns} columns, but the weight takes {self.shape[1]}")
        if x.dtype is not torch.bfloat16 or not x.is_contiguous():
            x = x.to(torch.bfloat16).contiguous()
        if bias is not None:
            bias = bias.to(torch.bfloat16)
        as_float = out_dtype is not torch.bfloat16
        out = torch.empty((rows, self.shape[0]), dtype=torch.float32 if as_float else torch.bfloat16)
        bias_address = None if bias is None else bias.data_ptr()
        self._linear(self.address, x.data_ptr(), rows, out.data_ptr(), as_float, bias_address)
        return out if out.dtype is out_dtype else out.to(out_dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        ids = ids.to(torch.int64).contiguous()
        kernel_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
        out = torch.empty((*ids.shape, self.shape[1]), dtype=kernel_dtype)
        self._rows(self.address, ids.data_ptr(), ids.numel(), out.data_ptr(), kernel_dtype is torch.float32)
        return out.to(dtype)


def rejects(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels do not serve this weight, or None."""
    if library.unavailable() is not None:
        return library.unavailable()
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"serves bfloat16 on the CPU, not {dtype} on {device.type}"
    columns = weight.shape[1]
    if isinstance(weight, Tensor):
        return None if columns % 2 == 0 else f"{columns} columns are odd"
    if weight.scheme.type != "int":
        return "serves integer codes"
    groups = weight.scale.shape[1]
    if weight.input_scale is not None:
        return "rounds inputs by a scale a row, not by a static one"
    if quantizes_input(weight.scheme):
        fits = weight.scheme.num_bits == 8 and groups == 1 and weight.offset is None and columns % 4 == 0
        return None if fits else "int8 inputs need symmetric 8-bit weights with a scale a row"
    step = STEP[weight.scheme.num_bits]
    return None if columns // groups % step == 0 else f"groups of {columns // groups} are no multiple of {step}"


def pack(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> CpuWeight:
    """Arrange a weight that `rejects` lets through, so for bfloat16 inputs on the CPU."""
    shape = (int(weight.shape[0]), int(weight.shape[1]))
    if isinstance(weight, Tensor):
        return CpuWeight(shape, BF16, _interleave(weight.to(torch.bfloat16)))
    if quantizes_input(weight.scheme):
        row_scale = _pad_rows(weight.scale.float()).flatten().contiguous()
        return CpuWeight(shape, W8A8, _interleave(_unsigned(weight.codes)), row_scale=row_scale)
    return _pack_groups(shape, weight)


def _pack_groups(shape: tuple[int, int], weight: QuantizedWeightLike) -> CpuWeight:
    repeat = _split_groups(shape[1] // weight.scale.shape[1], weight.scheme.num_bits)
    groups = weight.scale.shape[1] * repeat
    scale = _pad_rows(weight.scale.float().repeat_interleave(repeat, 1))
    offset = None if weight.offset is None else _pad_rows(weight.offset.float().repeat_interleave(repeat, 1))
    if weight.scheme.num_bits == 4:
        zero = 0
        if offset is not None and torch.equal(offset, -8 * scale):
            zero, offset = 8, None
        codes = _pack_nibbles(_pad_rows(weight.codes), groups)
    else:
        zero = 128
        codes = _interleave(_unsigned(weight.codes)).view(-1, groups, TILE * shape[1] // groups)
    row_scale = _row_scale(scale, offset)
    parts = [_tile_halves(scale / row_scale[:, None])]
    if offset is not None:
        parts.append(_tile_halves(offset / row_scale[:, None]))
    data = torch.cat((*parts, codes), dim=2).flatten(1)
    kind = INT4 if weight.scheme.num_bits == 4 else INT8
    group = shape[1] // groups
    has_offset = offset is not None
    return CpuWeight(shape, kind, data, group=group, row_scale=row_scale, has_offset=has_offset, zero=zero)


def _split_groups(group: int, num_bits: int) -> int:
    """Into how many parts to cut a group: the kernel scales x by group, and its sums overflow above MAX_GROUP."""
    step = STEP[num_bits]
    return next(parts for parts in range(1, group + 1) if group % (parts * step) == 0 and group // parts <= MAX_GROUP)


def _row_scale(scale: Tensor, offset: Tensor | None) -> Tensor:
    """A factor a row that brings scales and offsets into the range of fp16: a power of two, so that it costs no digit.

    With a single scale a row it is that scale itself, which then needs no rounding at all.
    """
    largest = scale.abs().amax(dim=1)
    if bool((scale == scale[:, :1]).all()) and bool((largest > 0).all()):
        return scale[:, 0].contiguous()
    if offset is not None:
        largest = torch.maximum(largest, offset.abs().amax(dim=1) / 16)
    exponent = torch.floor(torch.log2(largest.clamp(min=2.0**-100)))
    return torch.exp2(exponent).contiguous()


def _pad_rows(x: Tensor) -> Tensor:
    """Zero rows up to a whole number of tiles."""
    return F.pad(x, (0, 0, 0, -x.shape[0] % TILE)) if x.shape[0] % TILE else x


def _interleave(x: Tensor) -> Tensor:
    """[N, K] to bytes [tiles, ...] in the order (k / f, row of the tile, k % f), with f factors in four bytes.

    The four bytes are moved as one number: a third of the time of moving the factors one by one.
    """
    x = _pad_rows(x).contiguous()
    if x.data_ptr() % 4 or x.storage_offset() * x.element_size() % 4:  # a tensor of a mapped file begins anywhere
        x = x.clone()
    words = x.view(torch.int32).view(-1, TILE, x.shape[1] * x.element_size() // 4)
    return words.transpose(1, 2).contiguous().flatten(1).view(torch.uint8)


def _tile_halves(x: Tensor) -> Tensor:
    """[N, G] to fp16 bytes [tiles, G, 32]."""
    return x.view(-1, TILE, x.shape[1]).transpose(1, 2).to(torch.float16).contiguous().view(torch.uint8)


def _unsigned(codes: Tensor) -> Tensor:
    """int8 codes + 128 as uint8: the same bits but for the first."""
    return codes.view(torch.uint8) ^ 128


def _pack_nibbles(codes: Tensor, groups: int) -> Tensor:
    """Codes [N, K / 2] to [tiles, groups, bytes]: byte i of a word holds k = 8 j + i and, above it, k = 8 j + 4 + i."""
    b = codes.view(-1, TILE, codes.shape[1] // 4, 2, 2)  # two bytes of k = 0 .. 3, two of k = 4 .. 7
    low, high = b[..., 0, :], b[..., 1, :]
    even, odd = (low & 15) | (high << 4), (low >> 4) | (high & 0xF0)
    words = torch.stack((even, odd), dim=-1).flatten(-2).transpose(1, 2).contiguous()  # [tiles, K / 8, 16, 4]
    return words.view(words.shape[0], groups, -1)
