"""Symmetric integer grids for groups of weights: the scale with the least weighed squared error, and that error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops.cpu import library
from octavo.ops.dispatch import Candidate, Operation

RATIOS = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6)  # of the largest magnitude, that the lowest integer stands for at first
_TINY = 1e-30
_AT_ONCE = 1 << 25  # values of levels that are held at once


class Integers(NamedTuple):
    """The levels low .. high (-8 .. 7 for 4 bits)."""

    low: float
    high: float

    def starts(self) -> list[float]:
        """Levels that a group's largest value is given at first; their negatives are tried as well."""
        return [self.low / ratio for ratio in RATIOS]


def _fit_reference(values: Tensor, importance: Tensor | None, integers: Integers) -> Tensor:
    weighted = values if importance is None else values * importance
    peak = values.gather(-1, values.abs().argmax(dim=-1, keepdim=True))
    divisor = torch.where(peak == 0, torch.ones_like(peak), peak)
    best, best_gain = (peak / integers.low).squeeze(-1), torch.full_like(peak.squeeze(-1), -1.0)
    for start in integers.starts():
        for sign in (1, -1):
            levels = (values * (sign * start / divisor)).clamp_(*integers).round_()
            cross = torch.linalg.vecdot(weighted, levels)
            square = levels.mul_(levels)
            energy = square.sum(dim=-1) if importance is None else (square * importance).sum(dim=-1)
            gain = cross * cross / energy.clamp_min(_TINY)
            better = gain > best_gain
            best_gain = torch.where(better, gain, best_gain)
            best = torch.where(better, cross / energy.clamp_min(_TINY), best)
    return torch.where(peak.squeeze(-1) == 0, torch.zeros_like(best), best)


def _fit_cpu(values: Tensor, importance: Tensor | None, integers: Integers) -> Tensor:
    width = values.shape[-1]
    if importance is not None:
        if importance.numel() != width:
            return NotImplemented
        importance = importance.reshape(width).contiguous()
    values = values.contiguous()
    scales = values.new_empty(values.shape[:-1])
    starts = torch.tensor(integers.starts())
    _LIBRARY.octavo_fit_scales(
        values.data_ptr(), _address(importance), scales.data_ptr(), scales.numel(), width,
        *integers, starts.data_ptr(), len(starts),
    )  # fmt: skip
    return scales


def _difference_reference(
    weight: Tensor, importance: Tensor | None, width: int, integers: Integers, factors: Tensor | None, cut: float
) -> Tensor:
    rows, columns = weight.shape
    scaled = weight if factors is None else weight * factors
    values = torch.nn.functional.pad(scaled, (0, -columns % width)).view(rows, -1, width)
    weights = None
    if importance is not None:
        weights = importance if factors is None else importance / factors.square()
        weights = torch.nn.functional.pad(weights, (0, -columns % width)).view(-1, width)
    bound = cut * values.abs().amax(dim=-1, keepdim=True)
    values = torch.maximum(torch.minimum(values, bound), -bound)
    scale = fit_scales(values, weights, integers)
    scale = torch.where(scale == 0, torch.full_like(scale, torch.finfo(torch.float32).eps), scale).unsqueeze(-1)
    rounded = ((values / scale).clamp_(*integers).round_() * scale).view(rows, -1)[:, :columns]
    return (rounded if factors is None else rounded / factors) - weight


def _difference_cpu(
    weight: Tensor, importance: Tensor | None, width: int, integers: Integers, factors: Tensor | None, cut: float
) -> Tensor:
    weight = weight.contiguous()
    importance = None if importance is None else importance.contiguous()
    factors = None if factors is None else factors.contiguous()
    out = torch.empty_like(weight)
    starts = torch.tensor(integers.starts())
    _LIBRARY.octavo_rounding_difference(
        weight.data_ptr(), _address(importance), _address(factors), out.data_ptr(), *weight.shape, width, cut,
        *integers, starts.data_ptr(), len(starts),
    )  # fmt: skip
    return out


def _pick_reference(values: Tensor, wanted: Tensor, corner: Tensor, scales: Tensor, integers: Integers) -> Tensor:
    best, least = scales[:, 0], torch.full_like(scales[:, 0], torch.inf)
    for some in scales.t().split(max(1, _AT_ONCE // values.numel())):  # [C, N], as many as are quickly gone through
        levels = (values / some.unsqueeze(2)).clamp_(*integers).round_()
        energy = torch.linalg.vecdot(levels @ corner, levels)
        error, index = ((energy * some - 2 * torch.linalg.vecdot(levels, wanted)) * some).min(dim=0)
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better, some.gather(0, index[None])[0], best)
    return best


def _pick_cpu(values: Tensor, wanted: Tensor, corner: Tensor, scales: Tensor, integers: Integers) -> Tensor:
    values, wanted, corner, scales = (x.contiguous() for x in (values, wanted, corner, scales))
    best = torch.empty_like(scales[:, 0])
    _LIBRARY.octavo_pick_scales(
        values.data_ptr(), wanted.data_ptr(), corner.data_ptr(), scales.data_ptr(), best.data_ptr(),
        *values.shape, scales.shape[1], *integers,
    )  # fmt: skip
    return best


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_LIBRARY: Any = library.load()[0]


def _operation(name: str, compiled: Callable[..., Any], reference: Callable[..., Any]) -> Operation:
    kernel = Candidate("c++", compiled, ("cpu",), (torch.float32,), library.unavailable())
    return Operation(name, kernel, Candidate("torch", reference))


_fit = _operation("fit_scales", _fit_cpu, _fit_reference)
_difference = _operation("rounding_difference", _difference_cpu, _difference_reference)
_pick = _operation("pick_scales", _pick_cpu, _pick_reference)


def fit_scales(values: Tensor, importance: Tensor | None, integers: Integers) -> Tensor:
    """The scale [...], of either sign, of each group of float32 `values` [..., S], with the least weighed error.

    The sum of importance * error ** 2 is meant; `importance` is broadcastable to the values, None: all the same. For
    each of a few starting scales the values are rounded, and the scale that fits these levels q best follows in closed
    form, sum(h v q) / sum(h q q); what it leaves over is sum(h v v) - sum(h v q) ** 2 / sum(h q q), so the largest
    quotient wins. The lowest integer has no positive partner (-8, but only 7), so a scale whose sign puts the group's
    largest value on it makes steps an eighth of that value instead of 1/7.5. 0 for a group of zeros.
    """
    result: Tensor = _fit(values, importance, integers)
    return result


def rounding_difference(
    weight: Tensor,
    importance: Tensor | None,
    width: int,
    integers: Integers,
    factors: Tensor | None = None,
    cut: float = 1.0,
) -> Tensor:
    """What rounding adds to a float32 `weight` [N, K] whose columns are multiplied by `factors` [K] meanwhile: [N, K].

    The scales, one for `width` neighbouring columns of a row, are those of `fit_scales` with `importance` [K], which is
    of the inputs before they are divided by the factors. Magnitudes are cut to the share `cut` of a group's largest.
    """
    result: Tensor = _difference(weight, importance, width, integers, factors, cut)
    return result


def pick_scales(values: Tensor, wanted: Tensor, corner: Tensor, scales: Tensor, integers: Integers) -> Tensor:
    """Of `scales` [N, C] to try for a group of each row, the one s with the least s q C q' s - 2 s q wanted': [N].

    q [S] are the levels nearest to `values` [N, S] / s, C is `corner` [S, S]. All float32.
    """
    result: Tensor = _pick(values, wanted, corner, scales, integers)
    return result
