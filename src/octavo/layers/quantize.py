"""Quantizing plain weights while they are loaded, by rounding to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.errors import UserError

ON_LOAD = ("int8", "fp8", "w4a16")
GROUP_SIZES = (128, 64, 32)


def check_quantization(name: str | None) -> None:
    """Refuses a `quantization` that cannot be made on load."""
    if name is not None and name not in ON_LOAD:
        raise UserError(
            f"quantization {name!r} cannot be made while loading; choose one of {', '.join(ON_LOAD)}, "
            "or leave it out: an already quantized checkpoint is recognized by its own configuration.",
            param="quantization",
        )


def quantize_weight(weight: Tensor, quantization: str) -> Tensor | QuantizedWeight:
    """Rounds `weight` [N, K] on its device: `int8`, `fp8` with a scale a row, `w4a16` with one a group of 128 (64, 32).

    `fp8` rounds the layer's inputs, too, token by token; the others leave them. A row length that no group size divides
    leaves the weight as it is.
    """
    if quantization == "fp8":
        return _float8(weight)
    if quantization == "int8":
        return _symmetric(weight, WeightScheme(num_bits=8, strategy="channel"), weight.shape[1])
    group = next((size for size in GROUP_SIZES if weight.shape[1] % size == 0), None)
    if group is None:
        return weight
    return _symmetric(weight, WeightScheme(num_bits=4, strategy="group", group_size=group), group)


def _symmetric(weight: Tensor, scheme: WeightScheme, group: int) -> QuantizedWeight:
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // group, group)
    high = 2 ** (scheme.num_bits - 1) - 1
    if scheme.num_bits == 4:
        scale = _signed_scale(grouped, high + 1)
    else:
        scale = grouped.abs().amax(dim=2).div_(high).clamp_min_(torch.finfo(torch.float32).tiny)
    codes = (grouped / scale.unsqueeze(2)).round_().clamp_(-high - 1, high).view(rows, columns).to(torch.int8)
    if scheme.num_bits == 8:
        return QuantizedWeight(scheme, (rows, columns), codes, scale, None)
    unsigned = (codes + 8).to(torch.uint8)
    packed = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    return QuantizedWeight(scheme, (rows, columns), packed, scale, -8 * scale)


def _signed_scale(grouped: Tensor, low: int) -> Tensor:
    """[N, G] that takes the largest weight of each group to -low, the code without a counterpart (as GGUF's Q4_0 does).

    The scale is negative where that weight is positive. Of 16 levels none is lost: random weights have 22 % less
    squared error than with the largest weight at low - 1.
    """
    largest = grouped.gather(2, grouped.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    scale = largest / -low
    return torch.where(scale == 0, torch.finfo(torch.float32).tiny, scale)


def _float8(weight: Tensor) -> QuantizedWeight:
    scheme = WeightScheme(8, "float", strategy="channel", activations=ActivationScheme(type="float"))
    largest = torch.finfo(torch.float8_e4m3fn).max
    values = weight.float()
    scale = (values.abs().amax(dim=1, keepdim=True) / largest).clamp_min_(torch.finfo(torch.float32).tiny)
    codes = (values / scale).clamp_(-largest, largest).to(torch.float8_e4m3fn)
    return QuantizedWeight(scheme, (weight.shape[0], weight.shape[1]), codes, scale)
