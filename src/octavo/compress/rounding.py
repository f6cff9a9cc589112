"""The values that a quantized weight can take, and the nearest of them: W[n, k] = scale * (level - zero point)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.number_formats import FP4, FP8, format_of


@dataclass(frozen=True)
class Grid:
    """Scales of a weight [N, K], float32 but exact in the dtype that they are stored in.

    scale: [N, G] by group or channel (G = 1), [1, 1] for a whole tensor, [ceil(N / rows), ceil(K / columns)] by block.
    zero_point: int8 [N, G] in the codes' range for an asymmetric integer scheme, else None.
    global_scale: what the stored scales were multiplied with (NVFP4: the scale of a group is scale / global_scale).
    """

    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: float | None = None

    def steps(self, scheme: WeightScheme, rows: int) -> Tensor:
        """The scale of every row in each of its groups of neighbouring columns: float32 [N, G]."""
        scale = self.scale if self.global_scale is None else self.scale / self.global_scale
        if scheme.block_structure is not None:
            return scale.repeat_interleave(scheme.block_structure[0], 0)[:rows]
        return scale.expand(rows, scale.shape[1])


def group_width(scheme: WeightScheme, columns: int) -> int:
    """Neighbouring columns that share a scale."""
    if scheme.block_structure is not None:
        return scheme.block_structure[1]
    return scheme.group_size or columns


@dataclass(frozen=True)
class ScaleKind:
    """What a scale can be: a float of `dtype`; or a power of two; or an E4M3 float over one scale of the tensor."""

    dtype: torch.dtype
    peak: float = 1.0
    power_of_two: bool = False
    global_scale: float | None = None

    def usable(self, scale: Tensor) -> Tensor:
        """The usable scales next to `scale`, float32; zeros become the dtype's epsilon.

        A power of two is taken for what `scale` makes of the format's `peak`: exponents go up from 1.75, as in
        compressed-tensors, for E2M1 has a mantissa of one bit.
        """
        if self.power_of_two:
            peaks = (scale.abs() * self.peak).clamp_min(2.0**-120)
            return ((peaks.view(torch.int32) + (1 << 21)) & 0x7F800000).view(torch.float32) / 4
        factor = 1.0 if self.global_scale is None else self.global_scale
        stored = (scale * factor).to(self.dtype).float()
        least = 0.125 if self.dtype == torch.float8_e4m3fn else torch.finfo(self.dtype).eps
        return torch.where(stored == 0, torch.full_like(stored, least), stored) / factor

    def stored(self, usable: Tensor) -> Tensor:
        """What is stored for usable scales: the same, but for the scale of the tensor."""
        if self.global_scale is None:
            return usable
        return (usable * self.global_scale).to(self.dtype).float()


def scale_kind(scheme: WeightScheme, dtype: torch.dtype, global_scale: float | None = None) -> ScaleKind:
    """How the scales of a scheme are stored in a model whose scales otherwise are of `dtype`."""
    if scheme.power_of_two:
        return ScaleKind(torch.uint8, format_of(scheme).high, power_of_two=True)
    if scheme.strategy == "tensor_group":
        return ScaleKind(torch.float8_e4m3fn, global_scale=global_scale)
    return ScaleKind(dtype)


def global_scale(weights: Sequence[Tensor], scheme: WeightScheme) -> float | None:
    """NVFP4's one scale for all of some weights, that makes the largest group's scale E4M3's largest; None otherwise.

    Layers that a server fuses (q, k, v; gate, up) must have the same.
    """
    if scheme.strategy != "tensor_group":
        return None
    peak = max(float(weight.abs().max()) for weight in weights)
    scale = FP8.high * FP4.high / max(peak, torch.finfo(torch.float32).tiny)
    return float(torch.tensor(scale, dtype=torch.float32)) if math.isfinite(scale) else 1.0


def quantize(weight: Tensor, grid: Grid, scheme: WeightScheme) -> Tensor:
    """float32 [N, K] -> the codes of the nearest levels, [N, K]: int8, float8_e4m3fn, or E2M1 one a byte in uint8.

    Half goes to even, values beyond the range are cut.
    """
    number = format_of(scheme)
    levels = _grouped(weight, scheme) / grid.steps(scheme, len(weight)).unsqueeze(-1)
    if grid.zero_point is not None:
        levels += grid.zero_point.unsqueeze(-1)
    return number.encode(number.round_(levels).flatten(1)[:, : weight.shape[1]])


def dequantize(codes: Tensor, grid: Grid, scheme: WeightScheme) -> Tensor:
    """Codes [N, K] as `quantize` gives them -> float32 [N, K]."""
    levels = _grouped(format_of(scheme).decode(codes), scheme)
    if grid.zero_point is not None:
        levels = levels - grid.zero_point.unsqueeze(-1)
    weight = levels * grid.steps(scheme, len(codes)).unsqueeze(-1)
    return weight.flatten(1)[:, : codes.shape[1]].contiguous()


def _grouped(values: Tensor, scheme: WeightScheme) -> Tensor:
    """[N, K] -> [N, G, width]; a last group that is not whole is filled with zeros."""
    width = group_width(scheme, values.shape[1])
    missing = -values.shape[1] % width
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.reshape(len(values), -1, width)
