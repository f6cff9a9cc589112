"""Weights of 8 bits whose inputs are rounded to 8 bits, too: int8 x int8 and FP8 x FP8. Imports no triton."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.packed_weight import PackedWeight, QuantizedWeightLike, input_kind
from octavo.ops.triton import runtime
from octavo.ops.triton.scaled import Scaled

NAMES = {"int8": "triton int8 x int8", "fp8": "triton fp8 x fp8"}

_quantize_rows = runtime.lazy("quantize", "quantize_rows")
_linear = runtime.lazy("linear_8bit", "linear_8bit")
_linear_for_reader = runtime.lazy("linear_8bit", "linear_for_reader")


class Triton8Bit(PackedWeight):
    """data: int8 or float8_e4m3fn [N, K]; scale: float32 [N]."""

    input_kind: str

    def __init__(self, weight: QuantizedWeightLike, device: torch.device) -> None:
        kind = input_kind(weight.scheme)
        assert kind is not None
        self.input_kind = kind
        self.input_scale = weight.input_scale
        self.name = NAMES[kind]
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))
        self.data = weight.codes.to(device).contiguous()
        self.scale = weight.scale.to(device, torch.float32).flatten().contiguous()
        runtime.counters(device)
        runtime.one(device)
        if device.type == "cuda":  # with dependent launch, kernels read scales before they wait for anything
            torch.cuda.current_stream(device).synchronize()

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if x.shape[1] != self.shape[1]:
            raise ValueError(f"linear: x has {x.shape[1]} columns, but the weight takes {self.shape[1]}")
        codes, scale = _quantize_rows(x, self.input_kind, self.input_scale)
        return self.linear_quantized(codes, scale, bias, out_dtype)

    def linear_quantized(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        residual: Tensor | None = None,
    ) -> Tensor:
        return _linear(codes, scale, self.data, self.scale, bias, out_dtype, residual)

    def linear_for_reader(self, codes: Tensor, scale: Tensor) -> Tensor | Scaled:
        """`linear_quantized` in bfloat16, the scales left to a reader that takes `Scaled` where that is faster."""
        y: Tensor | Scaled = _linear_for_reader(codes, scale, self.data, self.scale)
        return y

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        codes = self.data.view(torch.uint8)[ids].view(self.data.dtype)  # not every device gathers float8
        return (codes.float() * self.scale[ids][..., None]).to(dtype)


def rejects(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels do not serve this weight, or None."""
    if device.type != "cuda":
        return f"serves cuda, not {device.type}"
    if runtime.unavailable() is not None:
        return runtime.unavailable()
    kind = None if isinstance(weight, Tensor) else input_kind(weight.scheme)
    if isinstance(weight, Tensor) or kind is None:
        return "serves 8-bit weights whose inputs are rounded to 8 bits"
    if kind == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        return "FP8 needs compute capability 8.9 or later"
    whole_rows = weight.scale.shape[1] == 1 and weight.offset is None and weight.scheme.num_bits == 8
    if not whole_rows or weight.shape[1] % 16:
        return "needs symmetric 8-bit weights with a scale a row, and a multiple of 16 columns"
    return None


def pack(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> Triton8Bit:
    """A weight that `rejects` lets through."""
    assert not isinstance(weight, Tensor)
    return Triton8Bit(weight, device)
