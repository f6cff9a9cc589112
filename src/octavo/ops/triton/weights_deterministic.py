"""Weights on a GPU whose products give a row the same bits among any other rows. Imports no triton.

The kernels of few rows are used for every number of rows, with one tile a weight: rows are a dimension of the grid, K
is walked in one order by one program, and nothing else is chosen by how many rows there are. cuBLAS and torch choose
by that number, and so do the fused layers, which therefore see none of the types that they know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.packed_weight import PackedWeight, QuantizedWeightLike
from octavo.ops.triton import runtime, weights, weights_8bit
from octavo.ops.triton.runtime import Tile
from octavo.ops.triton.weights import TritonWeight
from octavo.ops.triton.weights_8bit import Triton8Bit

ROWS = 64
WIDE = 16384  # from here on a weight has programs enough with twice as many of its rows each

_few_rows = runtime.lazy("linear", "few_rows")
_linear_8bit = runtime.lazy("linear_8bit", "linear_8bit")
_quantize_rows = runtime.lazy("quantize", "quantize_rows")


def fixed_tile(kind: str, n: int) -> Tile:
    """The tile for a weight of n rows, whatever the rows of x; kind: "bf16", "int4", "int8", "w8a8" or "fp8"."""
    wide = n >= WIDE
    if kind in ("w8a8", "fp8"):
        return Tile(ROWS, 128 if wide else 64, 128, 1, 4, 4)
    return Tile(ROWS, 128 if wide else 64, 128 if kind == "bf16" else 64, 1, 8 if wide else 4, 3)


class FixedTiles(PackedWeight):
    """A weight of the fast layouts, multiplied with its one tile."""

    def __init__(self, inner: TritonWeight | Triton8Bit) -> None:
        self.inner = inner
        self.shape = inner.shape
        self.input_kind = inner.input_kind
        self.name = f"{inner.name}, fixed tiles"
        kinds = {None: getattr(inner, "kind", ""), "int8": "w8a8", "fp8": "fp8"}
        self.tile = fixed_tile(kinds[inner.input_kind], self.shape[0])

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if x.shape[1] != self.shape[1]:
            raise ValueError(f"linear: x has {x.shape[1]} columns, but the weight takes {self.shape[1]}")
        if self.input_kind is not None:
            codes, scale = _quantize_rows(x, self.input_kind, self.inner.input_scale)
            return self.linear_quantized(codes, scale, bias, out_dtype)
        if x.shape[0] == 0:
            return x.new_empty((0, self.shape[0]), dtype=out_dtype)
        x = x.to(torch.bfloat16).contiguous()
        return _few_rows(x, self.inner, bias, out_dtype, tile=self.tile)  # type: ignore[no-any-return]

    def linear_quantized(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(self.inner, Triton8Bit)
        data, data_scale = self.inner.data, self.inner.scale
        result: Tensor = _linear_8bit(codes, scale, data, data_scale, bias, out_dtype, residual, tile=self.tile)
        return result

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.inner.rows(ids, dtype)


_LAYOUTS = (
    (weights.rejects_codes, weights.pack_codes),
    (weights.rejects_dense, weights.pack_dense),
    (weights_8bit.rejects, weights_8bit.pack),
)


def rejects(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no kernel with fixed tiles serves this weight, or None."""
    reasons = [layout_rejects(weight, dtype, device) for layout_rejects, _ in _LAYOUTS]
    return None if None in reasons else "; ".join(str(reason) for reason in reasons)


def pack(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> FixedTiles:
    """A weight that `rejects` lets through."""
    found = next(pack for refuses, pack in _LAYOUTS if refuses(weight, dtype, device) is None)
    return FixedTiles(found(weight, dtype, device))
