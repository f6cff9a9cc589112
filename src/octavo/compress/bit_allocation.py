"""Which width each layer gets: the least predicted loss for a number of bytes."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.compress.sensitivity import Unit
from octavo.errors import UserError
from octavo.units import size as in_words

Widths = list[int | None]  # of each unit, in bits; None: unquantized

_BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TARGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z%]*)\s*", re.IGNORECASE)
_HOW = "give bytes (90MB, 1.5GiB), a share of the original (40%) or bits a weight of the quantized layers (4.25bits)"


@dataclass(frozen=True)
class Target:
    """A size as the user said it: exactly one of bytes, share of the original and bits a weight is set."""

    num_bytes: int | None = None
    share: float | None = None
    bits: float | None = None

    def budget(self, fixed: int, original: int, weights: int) -> int:
        """Bytes for the quantized layers: `fixed` is what everything else takes, `original` the whole uncompressed
        checkpoint, `weights` counts the weights of the quantized layers."""
        if self.bits is not None:
            return int(weights * self.bits / 8)
        return (self.num_bytes if self.share is None else int(self.share * original)) - fixed  # type: ignore[operator]


def parse_target(text: str) -> Target:
    """A target size from "90MB", "40%" or "4.25bits"; UserError for anything else."""
    match = _TARGET.fullmatch(text)
    if match is not None and float(match[1]) > 0:
        number, unit = float(match[1]), match[2].lower()
        if unit == "%" and number <= 100:
            return Target(share=number / 100)
        if unit in ("bit", "bits", "bpw"):
            return Target(bits=number)
        if unit in _BYTES or not unit:
            return Target(num_bytes=int(number * _BYTES.get(unit, 1)))
    raise UserError(f"target_size is {text!r}; {_HOW}", param="target_size")


def allocate(units: Sequence[Unit], budget: int) -> Widths:
    """The widths of `units` within `budget` bytes.

    From the narrowest of each unit, whichever step lowers the loss most a byte is taken, as long as it fits. Steps are
    along the lower convex hull of a unit's choices, so this is the optimum for the bytes that it uses. CapacityError's
    kind of message where even the narrowest are too many.
    """
    hulls = [_hull(unit) for unit in units]
    places = [0] * len(units)
    left = budget - sum(unit.size[hull[0]] for unit, hull in zip(units, hulls, strict=True))
    if left < 0:
        raise UserError(
            f"the quantized layers would have to fit in {in_words(max(budget, 0))}, but at their narrowest they take "
            f"{in_words(budget - left)}; give a larger --target-size, or allow fewer bits in --bit-choices",
            param="target_size",
        )
    waiting: list[tuple[float, int]] = []
    for number in range(len(units)):
        _offer(waiting, units, hulls, places, number)
    while waiting:
        _, number = heapq.heappop(waiting)
        unit, hull, place = units[number], hulls[number], places[number]
        cost = unit.size[hull[place + 1]] - unit.size[hull[place]]
        if cost <= left:
            left -= cost
            places[number] += 1
            _offer(waiting, units, hulls, places, number)
    return [hull[place] for hull, place in zip(hulls, places, strict=True)]


def _offer(
    waiting: list[tuple[float, int]], units: Sequence[Unit], hulls: list[Widths], places: list[int], number: int
) -> None:
    """Put a unit's next step among those that wait, the best a byte first."""
    unit, hull, place = units[number], hulls[number], places[number]
    if place + 1 < len(hull):
        gain = unit.loss[hull[place]] - unit.loss[hull[place + 1]]
        heapq.heappush(waiting, (-gain / (unit.size[hull[place + 1]] - unit.size[hull[place]]), number))


def _hull(unit: Unit) -> Widths:
    """The choices that are best for some price of a byte, from the smallest to the largest."""
    hull: Widths = []
    for choice in sorted(unit.size, key=lambda width: (unit.size[width], unit.loss[width])):
        if hull and unit.loss[choice] >= unit.loss[hull[-1]]:
            continue
        while len(hull) > 1 and _gain(unit, hull[-2], hull[-1]) <= _gain(unit, hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _gain(unit: Unit, smaller: int | None, larger: int | None) -> float:
    """What a byte brings between two choices."""
    return (unit.loss[smaller] - unit.loss[larger]) / max(unit.size[larger] - unit.size[smaller], 1)


def predicted_loss(units: Sequence[Unit], widths: Widths) -> float:
    """The sum of what the units add, a token."""
    return sum(unit.loss[width] for unit, width in zip(units, widths, strict=True))


def total_size(units: Sequence[Unit], widths: Widths) -> int:
    """Bytes of the units."""
    return sum(unit.size[width] for unit, width in zip(units, widths, strict=True))


def least_budget(units: Sequence[Unit], loss: float) -> int:
    """The fewest bytes whose allocation is predicted to add at most `loss`."""
    low = sum(min(unit.size.values()) for unit in units)
    high = sum(max(unit.size.values()) for unit in units)
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        if predicted_loss(units, allocate(units, middle)) <= loss:
            high = middle
        else:
            low = middle
    return high
