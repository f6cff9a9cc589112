"""The axis of a chart: values to pixels, and round ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Values low..high onto pixels start..end, linear or logarithmic (then low > 0)."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value; what lies below a logarithmic axis is drawn at its start."""
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low or 1)
        return self.start + (self.end - self.start) * share

    def ticks(self, count: int) -> list[float]:
        """Round values inside the range: about `count` of them, or on a logarithmic axis 1, 2 and 5 of each decade."""
        if self.is_log:
            factors = (1, 2, 5) if self.high / self.low < 200 else (1,)
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            ticks = [factor * 10.0**power for power in powers for factor in factors]
            return [tick for tick in ticks if self.low <= tick <= self.high]
        step = _round_step((self.high - self.low or 1) / count)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next((factor * power for factor in (1, 2, 5) if raw <= factor * power), 10 * power)
