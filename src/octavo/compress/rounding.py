"""The values that a quantized weight can take, and the nearest of them: W[n, k] = scale * (level - zero point)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.number_formats import format_of, integer


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

    def rows(self, start: int, stop: int) -> Grid:
        """The grid of some rows of a weight with scales by group or channel."""
        zero = None if self.zero_point is None else self.zero_point[start:stop]
        return replace(self, scale=self.scale[start:stop], zero_point=zero)


def group_width(scheme: WeightScheme, columns: int) -> int:
    """Neighbouring columns that share a scale."""
    if scheme.block_structure is not None:
        return scheme.block_structure[1]
    return scheme.group_size or columns


def code_range(num_bits: int) -> tuple[int, int]:
    """Smallest and largest signed code, -8 and 7 for 4 bits."""
    return -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1


def usable_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale` rounded to the dtype that it is stored in, as float32; zeros become the dtype's epsilon."""
    stored = scale.to(dtype)
    stored = torch.where(stored == 0, torch.full_like(stored, torch.finfo(dtype).eps), stored)
    return stored.float()


def quantize(weight: Tensor, grid: Grid | Tensor, scheme: WeightScheme | int) -> Tensor:
    """float32 [N, K] -> the codes of the nearest levels, [N, K]: int8, float8_e4m3fn, or E2M1 one a byte in uint8.

    Half goes to even, values beyond the range are cut.
    """
    if isinstance(grid, Tensor):
        grid = Grid(grid)
    if isinstance(scheme, int):
        width = weight.shape[1] // grid.scale.shape[1]
        scheme = WeightScheme(scheme, group_size=width)
    number = format_of(scheme)
    levels = _grouped(weight, scheme) / grid.steps(scheme, len(weight)).unsqueeze(-1)
    if grid.zero_point is not None:
        levels += grid.zero_point.unsqueeze(-1)
    return number.encode(number.round_(levels).flatten(1)[:, : weight.shape[1]])


def dequantize(codes: Tensor, grid: Grid | Tensor, scheme: WeightScheme | None = None) -> Tensor:
    """Codes [N, K] as `quantize` gives them -> float32 [N, K]."""
    if isinstance(grid, Tensor):
        grid = Grid(grid)
    if scheme is None:
        scheme = WeightScheme(8, group_size=codes.shape[1] // grid.scale.shape[1])
    number = integer(8) if scheme.type == "int" else format_of(scheme)
    levels = _grouped(number.decode(codes), scheme)
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
