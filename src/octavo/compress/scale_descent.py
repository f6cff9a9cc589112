"""Scales for round-to-nearest by coordinate descent: errors of a row's groups are made to cancel each other.

The scale of a group decides which way each of its weights is rounded. Of some forty scales the one is taken that
leaves least of (W' - W) H (W' - W)', the squared error of the outputs with H = X'X, given how the row's other groups
are rounded at the time; one group after the other, twice around. Weights still are rounded to their nearest levels,
which GPTQ's are not, so nothing is computed column by column.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.number_formats import NumberFormat, format_of
from octavo.compress.rounding import Grid, group_width, scale_kind
from octavo.compress.threads import map_in_threads
from octavo.ops.integer_grid import Integers, pick_scales

# A scale as a share of the one that puts the group's largest weight on the lowest integer, of either sign.
_RATIOS = tuple(1.1 - 0.04 * step for step in range(20))
_ROUNDS = 2  # a third gains a quarter of what the second does
_WIDEST = 256  # inputs a group: its part of the Hessian is multiplied with for every scale that is tried
_ROWS = 256  # at a time on a CPU, so that what is worked on stays in a core's cache
_FLOOR = 1e-6  # of the mean diagonal, so that weights of inputs that were never seen keep a scale


def descends(scheme: WeightScheme) -> bool:
    """Whether this is there for a scheme: symmetric integers in groups that are not too wide."""
    narrow = scheme.strategy == "group" and (scheme.group_size or 0) <= _WIDEST
    return narrow and scheme.symmetric and not scheme.power_of_two and format_of(scheme).is_integer


def descend(weight: Tensor, hessian: Tensor, scheme: WeightScheme, dtype: torch.dtype) -> Grid:
    """The grid of float32 weight [N, K] for inputs with the float32 Hessian [K, K] (any positive factor); `scheme` is
    one that `descends`. Scales are exact in `dtype`, in which they are stored."""
    scaled = hessian / hessian.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    scaled.diagonal().add_(_FLOOR)
    width, number, usable = group_width(scheme, weight.shape[1]), format_of(scheme), scale_kind(scheme, dtype).usable
    if weight.is_cuda:
        return Grid(_descend(weight, scaled, width, number, usable))
    chunks = weight.split(_ROWS)
    scales = map_in_threads(lambda index: _descend(chunks[index], scaled, width, number, usable), len(chunks))
    return Grid(torch.cat(scales))


def _descend(
    weight: Tensor, hessian: Tensor, width: int, number: NumberFormat, usable: Callable[[Tensor], Tensor]
) -> Tensor:
    """Scales [N, G]."""
    size = weight.shape[1]
    starts = range(0, size, width)
    scales = torch.empty(len(weight), len(starts), device=weight.device)
    error = torch.zeros_like(weight)
    for turn in range(_ROUNDS):
        for group, start in enumerate(starts):
            stop = min(start + width, size)
            part, corner = weight[:, start:stop].contiguous(), hessian[start:stop, start:stop]
            known = size if turn else start  # the first time around, what comes after has no errors yet
            others = error[:, :known] @ hessian[:known, start:stop]
            if turn:
                others -= error[:, start:stop] @ corner
            best = _best_scale(part, corner, part @ corner - others, number, usable)
            scales[:, group] = best[:, 0]
            error[:, start:stop] = number.round_(part / best).mul_(best).sub_(part)
    return scales


def _best_scale(
    part: Tensor, corner: Tensor, wanted: Tensor, number: NumberFormat, usable: Callable[[Tensor], Tensor]
) -> Tensor:
    """The scale s [N, 1] of a group with the least s q C q' s - 2 s q wanted', q the levels of part / s.

    With wanted = w C - c, that is the squared error but for a constant: (s q - w) C (s q - w)' + 2 (s q - w) c'.
    """
    peak = part.gather(1, part.abs().argmax(dim=1, keepdim=True)) / number.low
    ratios = torch.tensor([sign * ratio for ratio in _RATIOS for sign in (1.0, -1.0)], device=part.device)
    return pick_scales(part, wanted, corner, usable(peak * ratios), Integers(number.low, number.high)).unsqueeze(1)
