"""Observers choose the scale, and for asymmetric schemes the zero point, of each group of weights.

Each takes weights [..., S] (any number of groups of S values), the importance of the inputs, broadcastable to them
(None: all the same), and the `Target` that the values are rounded to, and returns the groups' scales and zero points.
`minmax`, `mse` and `imatrix_mse` choose as LLM Compressor's do; `signed` (the default of RTN) and `imatrix_signed`
(the default of GPTQ) are Octavo's own. So is `hessian_signed`, best for RTN with calibration data: it chooses for all
groups of a row together (`scale_descent.py`), and is `imatrix_signed` where there is only the inputs' importance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.number_formats import NumberFormat, format_of
from octavo.compress.rounding import Grid, ScaleKind, group_width, scale_kind
from octavo.compress.scale_descent import descend, descends
from octavo.compress.threads import map_in_threads
from octavo.errors import UserError
from octavo.ops.integer_grid import RATIOS, Integers, fit_scales

_MSE_NORM, _MSE_SMALLEST, _MSE_STEPS = 2.4, 0.80, 100
_IMATRIX_NORM, _IMATRIX_SMALLEST, _IMATRIX_STEPS = 3.0, 0.05, 20
_TINY = 1e-30


@dataclass(frozen=True)
class Target:
    """What weights are rounded to: a number format, with or without a zero point, and how scales are stored."""

    number: NumberFormat
    scales: ScaleKind
    symmetric: bool = True

    @classmethod
    def of(cls, scheme: WeightScheme, dtype: torch.dtype, global_scale: float | None = None) -> Target:
        """The target of a scheme whose scales are stored in `dtype`, if the scheme does not say otherwise."""
        return cls(format_of(scheme), scale_kind(scheme, dtype, global_scale), scheme.symmetric)

    def from_range(self, low: Tensor, high: Tensor) -> Fit:
        """The grid that spans low to high (low <= 0 <= high), as compressed-tensors has it.

        A symmetric one puts the larger magnitude half a step beyond the largest integer (amax / 7.5 for 4 bits).
        """
        span = self.number.high - self.number.low
        if self.symmetric:
            return Fit(self.scales.usable(torch.maximum(-low, high) / (span / 2)))
        scale = self.scales.usable((high - low) / span)
        return Fit(scale, self.zero_point(self.number.low - low / scale))

    def zero_point(self, wanted: Tensor) -> Tensor:
        """The nearest zero point."""
        return wanted.round().clamp_(self.number.low, self.number.high)

    def levels(self, weight: Tensor, fit: Fit) -> Tensor:
        """The levels of `weight`, without the zero point: weight is about scale * levels."""
        levels = weight / fit.scale.unsqueeze(-1)
        if fit.zero is None:
            return self.number.round_(levels)
        zero = fit.zero.unsqueeze(-1)
        return self.number.round_(levels.add_(zero)).sub_(zero)


@dataclass(frozen=True)
class Fit:
    """The scales of some groups and, for asymmetric schemes, their zero points (integers in float32)."""

    scale: Tensor
    zero: Tensor | None = None

    def where(self, chosen: Tensor, other: Fit) -> Fit:
        """This one where `chosen`, else the other."""
        zero = None
        if self.zero is not None and other.zero is not None:
            zero = torch.where(chosen, self.zero, other.zero)
        return Fit(torch.where(chosen, self.scale, other.scale), zero)


Observer = Callable[[Tensor, Tensor | None, Target], Fit]


def _range(weight: Tensor) -> tuple[Tensor, Tensor]:
    low, high = torch.aminmax(weight, dim=-1)
    return low.clamp_max(0), high.clamp_min(0)


def minmax(weight: Tensor, importance: Tensor | None, target: Target) -> Fit:
    """The grid that spans the weights."""
    return target.from_range(*_range(weight))


def mse(weight: Tensor, importance: Tensor | None, target: Target) -> Fit:
    """The shrunk minmax grid (down to 0.8 of it) with the least sum of |error| ** 2.4."""
    ratios = [1 - step / _MSE_STEPS for step in range(round((1 - _MSE_SMALLEST) * _MSE_STEPS))]
    return _least_error(weight, None, target, ratios, _MSE_NORM)


def imatrix_mse(weight: Tensor, importance: Tensor | None, target: Target) -> Fit:
    """The shrunk minmax grid (20 steps down to a twentieth) with the least sum of importance * |error| ** 3."""
    steps = round((1 - _IMATRIX_SMALLEST) * _IMATRIX_STEPS)
    return _least_error(weight, importance, target, [1 - step / _IMATRIX_STEPS for step in range(steps)], _IMATRIX_NORM)


def _least_error(weight: Tensor, importance: Tensor | None, target: Target, ratios: list[float], norm: float) -> Fit:
    low, high = _range(weight)
    best = target.from_range(low, high)
    best_error = torch.full_like(low, torch.inf)
    for ratio in ratios:
        fit = target.from_range(low * ratio, high * ratio)
        error = target.levels(weight, fit).mul_(fit.scale.unsqueeze(-1)).sub_(weight).abs_().pow_(norm)
        error = error.sum(dim=-1) if importance is None else (error * importance).sum(dim=-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = fit.where(better, best)
    return best


def imatrix_signed(weight: Tensor, importance: Tensor | None, target: Target) -> Fit:
    """The scale, of either sign, with the least sum of importance * error ** 2.

    For integers see `octavo.ops.integer_grid.fit_scales`, for asymmetric grids `_fit_asymmetric`. For floats, whose
    scales have no sign, a few starting scales are tried: the weights are rounded, and the scale that fits these levels
    q best follows in closed form, sum(h w q) / sum(h q q); what it leaves over is sum(h w w) - sum(h w q) ** 2 /
    sum(h q q), so the largest quotient wins.
    """
    if not target.symmetric:
        return _fit_asymmetric(weight, importance, target)
    if target.scales.power_of_two:
        return _least_power_of_two(weight, importance, target)
    number = target.number
    if number.is_integer:
        return Fit(target.scales.usable(fit_scales(weight, importance, Integers(number.low, number.high))))
    weighted = weight if importance is None else weight * importance
    peak = weight.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    best, best_gain = (peak / number.high).squeeze(-1), torch.full_like(peak.squeeze(-1), -1.0)
    for ratio in RATIOS:
        levels = number.round_(weight * (number.high / ratio / peak))
        cross, energy = _moments(levels, weighted, importance)
        gain = cross * cross / energy.clamp_min(_TINY)
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best = torch.where(better, cross / energy.clamp_min(_TINY), best)
    return Fit(target.scales.usable(best))


def _moments(levels: Tensor, weighted: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """sum(h w q) and sum(h q q) over the last dimension; the levels are overwritten."""
    cross = torch.linalg.vecdot(weighted, levels)
    square = levels.mul_(levels)
    return cross, square.sum(dim=-1) if importance is None else (square * importance).sum(dim=-1)


def _least_power_of_two(weight: Tensor, importance: Tensor | None, target: Target) -> Fit:
    """Of the minmax scale, its half and its double, the one with the least sum of importance * error ** 2."""
    return _least_error(weight, importance, target, [2.0, 1.0, 0.5], 2.0)


def _fit_asymmetric(weight: Tensor, importance: Tensor | None, target: Target) -> Fit:
    """The scale and zero point with the least sum of importance * error ** 2, from a few starting ranges.

    For the levels of each, the line w = s q + o that fits best gives the zero point -o / s; rounded to an integer, the
    best scale for it follows in closed form.
    """
    weights = torch.ones_like(weight[..., :1, :]) if importance is None else importance
    weights = weights.expand_as(weight)
    total = weights.sum(dim=-1).clamp_min(_TINY)
    mean = (weights * weight).sum(dim=-1) / total
    low, high = _range(weight)
    best = target.from_range(low, high)
    best_error = torch.full_like(low, torch.inf)
    for ratio in RATIOS:
        start = target.from_range(low * ratio, high * ratio)
        assert start.zero is not None
        levels = target.levels(weight, start)
        weighted = levels * weights
        level_mean = weighted.sum(dim=-1) / total
        variance = (weighted * levels).sum(dim=-1) / total - level_mean.square()
        covariance = (weighted * weight).sum(dim=-1) / total - level_mean * mean
        slope = torch.where(variance > 1e-6, covariance / variance.clamp_min(1e-6), start.scale)
        slope = torch.where(slope > 0, slope, start.scale)
        zero = target.zero_point(start.zero + level_mean - mean / slope)
        shifted = levels.add_((start.zero - zero).unsqueeze(-1))
        cross, energy = _moments(shifted, weights * weight, weights)
        scale = torch.where(cross > 0, cross / energy.clamp_min(_TINY), start.scale)
        fit = Fit(target.scales.usable(scale), zero)
        rounded = target.levels(weight, fit).mul_(fit.scale.unsqueeze(-1))
        error = (rounded.sub_(weight).square_() * weights).sum(dim=-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = fit.where(better, best)
    return best


def signed(weight: Tensor, importance: Tensor | None, target: Target) -> Fit:
    """As `imatrix_signed`, but all inputs count the same, so no calibration data is needed."""
    return imatrix_signed(weight, None, target)


OBSERVERS: dict[str, Observer] = {
    "minmax": minmax,
    "memoryless_minmax": minmax,
    "static_minmax": minmax,
    "mse": mse,
    "memoryless_mse": mse,
    "imatrix_mse": imatrix_mse,
    "signed": signed,
    "imatrix_signed": imatrix_signed,
    "hessian_signed": imatrix_signed,  # by itself: a group alone
}
FITTED = ("signed", "imatrix_signed", "hessian_signed")  # by `fit_scales`, where the grid is one of integers
USES_IMPORTANCE = ("imatrix_mse", "imatrix_signed", "hessian_signed")


def observer(name: str) -> Observer:
    """The observer of that name; UserError lists all."""
    if name not in OBSERVERS:
        raise UserError(f"unknown observer {name!r}; known are {', '.join(OBSERVERS)}", param="observer")
    return OBSERVERS[name]


def uses_hessian(name: str, scheme: WeightScheme) -> bool:
    """Whether the observer `name` makes use of how the inputs go together, for a scheme."""
    return name == "hessian_signed" and descends(scheme)


def choose_grid(
    weight: Tensor,
    importance: Tensor | None,
    scheme: WeightScheme,
    name: str,
    dtype: torch.dtype,
    global_scale: float | None = None,
) -> Grid:
    """The grid of weight [N, K] by the observer `name`; scales are exact in `dtype`, which they are stored in.

    `importance` [K] weighs the inputs (the Hessian's diagonal), or is the Hessian [K, K] itself, of which most
    observers take the diagonal; its factor does not matter.
    """
    if importance is not None and importance.dim() == 2:
        if uses_hessian(name, scheme):
            return descend(weight, importance, scheme, dtype)
        importance = importance.diagonal()
    target, choose = Target.of(scheme, dtype, global_scale), observer(name)
    together = _rows_together(scheme, len(weight))
    values = _by_groups(weight, group_width(scheme, weight.shape[1]), together)
    weights = None
    if importance is not None:
        weights = _by_groups(normal_importance(importance)[None], group_width(scheme, weight.shape[1]), 1).repeat(
            1, 1, together
        )
    if weight.is_cuda:
        fit = choose(values, weights, target)
    else:
        fits = map_in_threads(
            lambda group: choose(values[group], None if weights is None else weights[group], target), len(values)
        )
        zeros = [fit.zero for fit in fits if fit.zero is not None]
        fit = Fit(torch.stack([fit.scale for fit in fits]), torch.stack(zeros) if zeros else None)
    zero = None if fit.zero is None else fit.zero.to(torch.int8).t().contiguous()
    return Grid(target.scales.stored(fit.scale.t().contiguous()), zero, global_scale)


def normal_importance(importance: Tensor) -> Tensor:
    """Importance [K] with a mean of about 1, and a floor: weights of inputs that were never seen keep a scale."""
    return (importance / importance.mean().clamp_min(_TINY)).clamp_min(1e-6)


def is_integer_grid(scheme: WeightScheme) -> bool:
    """Whether neighbouring weights of a row share a scale and round to integers on both sides of zero."""
    return scheme.symmetric and format_of(scheme).is_integer and scheme.strategy in ("group", "channel")


def _rows_together(scheme: WeightScheme, rows: int) -> int:
    """Neighbouring rows that share a scale."""
    if scheme.block_structure is not None:
        return scheme.block_structure[0]
    return rows if scheme.strategy == "tensor" else 1


def _by_groups(weight: Tensor, width: int, together: int) -> Tensor:
    """[N, K] -> [groups of columns, groups of rows, values of a group]; missing rows and columns are zeros."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % together))
    cells = padded.reshape(padded.shape[0] // together, together, padded.shape[1] // width, width)
    return cells.permute(2, 0, 1, 3).reshape(cells.shape[2], cells.shape[0], together * width)
