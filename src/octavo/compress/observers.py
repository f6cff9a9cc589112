"""Observers choose the scale of each group of weights.

Each takes weights [R, S] (R groups of S values), the importance of the S inputs [S] or [R, S] (None: all the same) and
the number of bits, and returns R scales in float32. `minmax`, `mse` and `imatrix_mse` choose as LLM Compressor's do;
`signed`
(the default of RTN) and `imatrix_signed` (the default of GPTQ) are Octavo's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.rounding import code_range, usable_scale
from octavo.compress.threads import map_in_threads
from octavo.errors import UserError

Observer = Callable[[Tensor, Tensor | None, int], Tensor]

_MSE_NORM, _MSE_SMALLEST, _MSE_STEPS = 2.4, 0.80, 100
_IMATRIX_NORM, _IMATRIX_SMALLEST, _IMATRIX_STEPS = 3.0, 0.05, 20
_SIGNED_RATIOS = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6)


def minmax(weight: Tensor, importance: Tensor | None, num_bits: int) -> Tensor:
    """The largest magnitude lands half a step beyond the largest code (amax / 7.5 for 4 bits)."""
    low, high = code_range(num_bits)
    return weight.abs().amax(dim=1) / ((high - low) / 2)


def mse(weight: Tensor, importance: Tensor | None, num_bits: int) -> Tensor:
    """The shrunk minmax scale (down to 0.8 of it) with the least sum of |error| ** 2.4."""
    ratios = [1 - step / _MSE_STEPS for step in range(round((1 - _MSE_SMALLEST) * _MSE_STEPS))]
    return _least_error(weight, None, num_bits, ratios, _MSE_NORM)


def imatrix_mse(weight: Tensor, importance: Tensor | None, num_bits: int) -> Tensor:
    """The shrunk minmax scale (20 steps down to a twentieth) with the least sum of importance * |error| ** 3."""
    steps = round((1 - _IMATRIX_SMALLEST) * _IMATRIX_STEPS)
    ratios = [1 - step / _IMATRIX_STEPS for step in range(steps)]
    return _least_error(weight, importance, num_bits, ratios, _IMATRIX_NORM)


def _least_error(weight: Tensor, importance: Tensor | None, num_bits: int, ratios: list[float], norm: float) -> Tensor:
    low, high = code_range(num_bits)
    start = minmax(weight, None, num_bits).clamp_min(torch.finfo(torch.float32).tiny)
    best, best_error = start.clone(), torch.full_like(start, torch.inf)
    for ratio in ratios:
        scale = start * ratio
        rounded = (weight / scale.unsqueeze(1)).round_().clamp_(low, high).mul_(scale.unsqueeze(1))
        error = rounded.sub_(weight).abs_().pow_(norm)
        error = error.sum(dim=1) if importance is None else (error * importance).sum(dim=1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, scale, best)
    return best


def imatrix_signed(weight: Tensor, importance: Tensor | None, num_bits: int) -> Tensor:
    """The scale, of either sign, with the least sum of importance * error ** 2.

    The lowest code has no positive partner (-8, but only 7), so a scale whose sign puts the group's largest value on it
    makes steps an eighth of that value instead of 1/7.5. For each of a few starting scales the values are rounded and
    the scale that fits these codes best follows in closed form, sum(h w q) / sum(h q q); what it leaves over is
    sum(h w w) - sum(h w q) ** 2 / sum(h q q), so the largest quotient wins.
    """
    low, high = code_range(num_bits)
    weighted = weight if importance is None else weight * importance
    peak = weight.gather(1, weight.abs().argmax(dim=1, keepdim=True))
    peak = torch.where(peak == 0, torch.full_like(peak, torch.finfo(torch.float32).tiny), peak)
    best, best_gain = peak.squeeze(1) / low, torch.full((len(weight),), -1.0)
    for ratio in _SIGNED_RATIOS:
        for sign in (1, -1):
            codes = (weight * (sign * low / ratio / peak)).round_().clamp_(low, high)
            cross = torch.linalg.vecdot(weighted, codes)
            square = codes.mul_(codes)
            energy = square.sum(dim=1) if importance is None else (square * importance).sum(dim=1)
            gain = cross * cross / energy.clamp_min(1e-30)
            better = gain > best_gain
            best_gain = torch.where(better, gain, best_gain)
            best = torch.where(better, cross / energy.clamp_min(1e-30), best)
    return best


def signed(weight: Tensor, importance: Tensor | None, num_bits: int) -> Tensor:
    """As `imatrix_signed`, but all inputs count the same, so no calibration data is needed."""
    return imatrix_signed(weight, None, num_bits)


OBSERVERS: dict[str, Observer] = {
    "minmax": minmax,
    "memoryless_minmax": minmax,
    "static_minmax": minmax,
    "mse": mse,
    "memoryless_mse": mse,
    "imatrix_mse": imatrix_mse,
    "signed": signed,
    "imatrix_signed": imatrix_signed,
}
USES_IMPORTANCE = ("imatrix_mse", "imatrix_signed")


def observer(name: str) -> Observer:
    """The observer of that name; UserError lists all."""
    if name not in OBSERVERS:
        raise UserError(f"unknown observer {name!r}; known are {', '.join(OBSERVERS)}", param="observer")
    return OBSERVERS[name]


def choose_scales(
    weight: Tensor, importance: Tensor | None, scheme: WeightScheme, name: str, dtype: torch.dtype
) -> Tensor:
    """Scales [N, G] of weight [N, K] by the observer `name`, float32 but exact in `dtype`, which they are stored in.

    `importance` [K] weighs the inputs (the Hessian's diagonal); its factor does not matter.
    """
    groups = scheme.num_groups(weight.shape[1])
    grouped = weight.reshape(len(weight), groups, -1)
    weights = None if importance is None else (importance / importance.mean().clamp_min(1e-30)).reshape(groups, -1)
    choose = observer(name)

    def scales_of(group: int) -> Tensor:
        values = grouped[:, group].contiguous()
        return choose(values, None if weights is None else weights[group], scheme.num_bits)

    return usable_scale(torch.stack(map_in_threads(scales_of, groups), dim=1), dtype)
