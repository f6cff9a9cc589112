"""Weights on a GPU: dense in bf16, and 4- or 8-bit codes that are expanded in the product. Imports no triton."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.cuda import linear_w4 as linear_w4_cuda
from octavo.ops.packed_weight import PackedWeight, QuantizedWeightLike, quantizes_input
from octavo.ops.triton import runtime

DENSE_ROWS = 64  # up to here the own kernel, then cuBLAS
CODES_ROWS = 256  # up to here codes are expanded inside the product, then once for the whole weight
COPIED_ROWS = 96  # up to here with a copy: 8B in 4 bits, four products of 64 rows 97 us (cuBLAS 135), of 128 168 (146)
UNITS = (128, 64, 32)

_few_rows = runtime.lazy("linear", "few_rows")
_rms_norm = runtime.lazy("elementwise", "rms_norm")
_plain_product = runtime.lazy("linear", "plain_product")


class TritonWeight(PackedWeight):
    """A weight that the few-row kernels read.

    kind: "bf16", "int4" or "int8". data: bf16 [N, K], int8 [N, K], or the words of `linear_w4`.
    unit: columns that are surely scaled together (8 bits), or stored together (4).
    scale, offset: float32 [N, groups] or None.
    """

    kind: str
    unit: int = 0
    groups: int = 1
    data: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    most_rows: int

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.scale, self.offset) if part is not None)

    def few(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, **parts: Any
    ) -> Tensor:
        """The product with what `linear.few_rows` fuses to it."""
        return _few_rows(x, self, bias, out_dtype, **parts)

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if x.shape[1] != self.shape[1]:
            raise ValueError(f"linear: x has {x.shape[1]} columns, but the weight takes {self.shape[1]}")
        if x.shape[0] > self.most_rows:
            return _plain_product(x, self.dense(), bias, out_dtype)
        if x.shape[0] == 0:
            return x.new_empty((0, self.shape[0]), dtype=out_dtype)
        return self.few(x.to(torch.bfloat16).contiguous(), bias, out_dtype)

    def dense(self) -> Tensor:
        """The weight [N, K] in bf16."""
        raise NotImplementedError


class TritonDense(TritonWeight):
    """The weight as it is: the own kernel for few rows, cuBLAS for more."""

    name = "triton dense"
    kind = "bf16"
    most_rows = DENSE_ROWS

    def __init__(self, weight: Tensor, device: torch.device) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.data = weight.to(device=device, dtype=torch.bfloat16).contiguous()
        _settle(device)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self.data).to(dtype)

    def dense(self) -> Tensor:
        return self.data


class TritonCodes(TritonWeight):
    """4- or 8-bit codes with a scale (and perhaps an offset) a group."""

    most_rows = CODES_ROWS

    def __init__(self, weight: QuantizedWeightLike, device: torch.device) -> None:
        from octavo.ops.triton import linear_w4

        self._copy: Tensor | None = None
        self._dequantize = linear_w4.dequantize
        self._unpack = linear_w4.unpack_codes
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))
        self.kind = f"int{weight.scheme.num_bits}"
        self.name = f"triton {weight.scheme.num_bits}-bit"
        self.groups = weight.scale.shape[1]
        self.unit = linear_w4.UNIT if self.kind == "int4" else _unit(self.shape[1], self.groups)
        codes = weight.codes.to(device)
        self.data = linear_w4.pack_codes(codes) if self.kind == "int4" else codes.contiguous()
        self.scale = weight.scale.to(device, torch.float32).contiguous()
        self.offset = None if weight.offset is None else weight.offset.to(device, torch.float32).contiguous()
        if self.offset is not None and self.kind == "int4" and torch.equal(self.offset, -8 * self.scale):
            self.offset = None  # symmetric, which the kernels know
        self.unit_scales: Tensor | None = None
        self._has_cuda = linear_w4_cuda.rejects(self) is None
        if self._has_cuda:
            self.unit_scales = linear_w4_cuda.pack_scales(self.scale, self.shape[1])
        _settle(device)

    def few(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, **parts: Any
    ) -> Tensor:
        if self._has_cuda and x.shape[0] <= linear_w4_cuda.MOST_ROWS:
            return _few_rows_cuda(x, self, bias, out_dtype, **parts)
        return super().few(x, bias, out_dtype, **parts)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.scale is not None
        flat = ids.flatten()
        codes = self.data[flat]
        if self.kind == "int4":
            codes = self._unpack(codes, self.shape[1])
        weight = codes.float().unflatten(-1, (self.groups, -1))
        scale = self.scale[flat][..., None]
        if self.offset is not None:
            weight = weight * scale + self.offset[flat][..., None]
        else:
            weight = (weight - 8 if self.kind == "int4" else weight) * scale
        return weight.to(dtype).reshape(*ids.shape, self.shape[1])

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(part.nbytes for part in (self._copy, self.unit_scales) if part is not None)

    @property
    def dense_copy_bytes(self) -> int:
        return 2 * self.shape[0] * self.shape[1] if self._copy is None else 0

    def keep_dense_copy(self) -> None:
        self._copy, self.most_rows = self.dense(), COPIED_ROWS

    def dense(self) -> Tensor:
        assert self.scale is not None
        if self._copy is not None:
            return self._copy
        return self._dequantize(self.data, self.scale, self.offset, self.kind, self.shape, self.unit)


def _few_rows_cuda(
    x: Tensor,
    weight: TritonCodes,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `linear.few_rows`, by the kernel in CUDA C++."""
    processors = runtime.num_multiprocessors(x.device)
    if norm is not None and not linear_w4_cuda.takes(x.shape[0], weight, True, gate is not None, processors):
        x, norm = _rms_norm(x, norm, eps), None
    early = runtime.uses_dependent_launch(x.device)
    return linear_w4_cuda.few_rows(x, weight, bias, out_dtype, norm, eps, gate, residual, early)


def _settle(device: torch.device) -> None:
    """Waits until the weight is written: with dependent launch, kernels read weights before they wait for anything."""
    runtime.counters(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _unit(columns: int, groups: int) -> int:
    """The largest unit that divides a group, or 0."""
    return next((unit for unit in UNITS if (columns // groups) % unit == 0), 0)


def _rejects_device(dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda" or dtype != torch.bfloat16:
        return f"serves bfloat16 on CUDA, not {dtype} on {device.type}"
    return runtime.unavailable()


def rejects_dense(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `TritonDense` does not serve this weight, or None."""
    if not isinstance(weight, Tensor):
        return "serves weights that are not quantized"
    columns = weight.shape[1]
    return _rejects_device(dtype, device) or (f"{columns} columns are no multiple of 16" if columns % 16 else None)


def rejects_codes(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `TritonCodes` does not serve this weight, or None."""
    if isinstance(weight, Tensor):
        return "serves quantized weights"
    if weight.scheme.type != "int" or quantizes_input(weight.scheme):
        return "serves integer codes with bf16 inputs"
    columns, groups = weight.shape[1], weight.scale.shape[1]
    if not _unit(columns, groups):
        return f"groups of {columns // groups} are no multiple of {UNITS[-1]}"
    return _rejects_device(dtype, device)


def pack_dense(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> TritonDense:
    """Keep a weight that `rejects_dense` lets through."""
    assert isinstance(weight, Tensor)
    return TritonDense(weight, device)


def pack_codes(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> TritonCodes:
    """Arrange a weight that `rejects_codes` lets through."""
    assert not isinstance(weight, Tensor)
    return TritonCodes(weight, device)
