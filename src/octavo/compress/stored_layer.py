"""A quantized layer as the checkpoint stores it, and back: what a resumed run needs to go on with the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.packing import unpack_codes
from octavo.checkpoint.scheme import WeightScheme
from octavo.checkpoint.small_floats import power_of_two
from octavo.checkpoint.writer import compressed_parameters
from octavo.compress.modifiers.base import LayerResult
from octavo.compress.rounding import Grid


def layer_parameters(result: LayerResult) -> dict[str, Tensor]:
    """The stored tensors, by full name, of a layer that was quantized."""
    assert result.codes is not None and result.grid is not None and result.scheme is not None
    grid = result.grid
    return compressed_parameters(
        result.name, result.codes, grid.scale, result.scheme, grid.zero_point, result.scale_dtype,
        grid.global_scale, result.input_scale,
    )  # fmt: skip


def read_layer(
    file: Any, name: str, scheme: WeightScheme, shape: tuple[int, int]
) -> tuple[Tensor, Grid, Tensor | None]:
    """Codes, grid and static input scale of layer `name` from an open safetensors file of `layer_parameters`."""
    stored = set(file.keys())

    def part(leaf: str) -> Tensor | None:
        return file.get_tensor(f"{name}.{leaf}") if f"{name}.{leaf}" in stored else None

    packed, zero, total = part("weight_packed"), part("weight_zero_point"), part("weight_global_scale")
    codes = part("weight") if packed is None else _unpacked(packed, scheme.num_bits, shape[1])
    scale = file.get_tensor(f"{name}.weight_scale")
    scale = power_of_two(scale) if scale.dtype == torch.uint8 else scale.float()
    if scheme.strategy == "tensor":
        scale = scale.reshape(1, 1)
    if zero is not None and zero.dtype == torch.int32:
        zero = unpack_codes(zero.T.contiguous(), scheme.num_bits, shape[0]).T.contiguous()
    assert codes is not None
    return codes, Grid(scale, zero, None if total is None else float(total)), part("input_scale")


def _unpacked(packed: Tensor, num_bits: int, columns: int) -> Tensor:
    """Integers from a stream of int32, or E2M1 codes from bytes of two, the first in the low half."""
    if packed.dtype == torch.int32:
        return unpack_codes(packed, num_bits, columns)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
