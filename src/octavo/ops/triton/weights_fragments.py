"""4-bit weights as `linear_fragments.py` reads them; not among the layouts yet, its gain is to be measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.ops.packed_weight import QuantizedWeightLike, dequantize
from octavo.ops.triton import runtime
from octavo.ops.triton.weights import CODES_ROWS, TritonWeight, _settle

UNIT = 128

_fragments = runtime.lazy("linear_fragments", "fragments")
_unpack = runtime.lazy("linear_fragments", "unpack")
_pack = runtime.lazy("linear_fragments", "pack")


class TritonFragments(TritonWeight):
    """4-bit codes with a scale (and perhaps an offset) for groups of a multiple of 128 columns."""

    name = "triton 4-bit fragments"
    kind = "int4"
    unit = UNIT
    most_rows = CODES_ROWS

    def __init__(self, weight: QuantizedWeightLike, device: torch.device) -> None:
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))
        self.groups = weight.scale.shape[1]
        if weight.scheme.num_bits != 4 or (self.shape[1] // self.groups) % UNIT:
            raise ValueError(
                f"groups of {self.shape[1] // self.groups} columns of {weight.scheme.num_bits} bits: "
                f"4-bit groups of a multiple of {UNIT} are taken"
            )
        self.data = _pack(weight.codes.to(device))
        self.scale = weight.scale.to(device, torch.float32).contiguous()
        self.offset = None if weight.offset is None else weight.offset.to(device, torch.float32).contiguous()
        if self.offset is not None and torch.equal(self.offset, -8 * self.scale):
            self.offset = None  # symmetric, which the kernel knows
        _settle(device)

    def few(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, **parts: Any
    ) -> Tensor:
        return _fragments(x, self, bias, out_dtype, **parts)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.scale is not None
        flat = ids.flatten()
        scale = self.scale[flat]
        offset = -8 * scale if self.offset is None else self.offset[flat]
        codes = _unpack(self.data[flat], self.shape[1])
        return dequantize(codes, 8, scale, offset).to(dtype).reshape(*ids.shape, self.shape[1])

    def dense(self) -> Tensor:
        return self.rows(torch.arange(self.shape[0], device=self.data.device), torch.bfloat16)
