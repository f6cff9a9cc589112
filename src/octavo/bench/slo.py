"""Service-level objectives: stated before the load, judged after it.

A request holds the objective when each of its own figures is within its limit: time to first token, the mean of its
gaps (tpot) for the ITL limit, and its whole latency. Attainment is the share of requests that do; a failed request does
not. The objective is met when attainment reaches the percentile and, besides, that percentile of all real gaps is
within the ITL limit, so that stalls inside otherwise quick requests count too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench import statistics
from octavo.bench.records import RequestRecord
from octavo.errors import UserError

PRESETS = {
    "chat": {"ttft_ms": 200.0, "itl_ms": 50.0, "percentile": 99.0},
    "rag": {"ttft_ms": 300.0, "itl_ms": 100.0, "request_latency_ms": 3000.0, "percentile": 99.0},
}
LIMITS = ("ttft_ms", "itl_ms", "request_latency_ms")


@dataclass(frozen=True)
class Slo:
    """Limits in milliseconds (None: not limited) and the percentile of requests that must hold them all."""

    name: str
    ttft_ms: float | None = None
    itl_ms: float | None = None
    request_latency_ms: float | None = None
    percentile: float = 99.0

    @classmethod
    def parse(cls, text: str) -> Slo:
        """A preset's name, or limits such as "ttft_ms=200,itl_ms=50,request_latency_ms=3000,percentile=99"."""
        name = text.strip()
        if name in PRESETS:
            return cls(name=name, **PRESETS[name])
        values: dict[str, float] = {}
        for part in filter(None, (p.strip() for p in name.split(","))):
            key, _, raw = part.partition("=")
            if key.strip() not in (*LIMITS, "percentile"):
                known = ", ".join((*LIMITS, "percentile"))
                raise UserError(f"--slo has {part!r}; give {' or '.join(PRESETS)}, or limits of {known}", param="slo")
            try:
                value = float(raw)
            except ValueError:
                value = math.nan
            if not 0 < value < math.inf:
                raise UserError(f"--slo has {part!r}; the limit must be a number above 0", param="slo")
            values[key.strip()] = value
        if not any(limit in values for limit in LIMITS):
            raise UserError(f"--slo is {text!r}; it limits nothing, give one of {', '.join(LIMITS)}", param="slo")
        if not 0 < values.get("percentile", 99) <= 100:
            raise UserError(f"--slo percentile is {values['percentile']:g}; it must be in (0, 100]", param="slo")
        return cls(name="custom", **values)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set."""
        return {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}

    def describe(self) -> str:
        """One line for people."""
        words = {"ttft_ms": "time to first token", "itl_ms": "gap between tokens"}
        limits = ", ".join(f"{words.get(name, 'whole request')} <= {value:g} ms" for name, value in self.limits.items())
        return f"{self.name}: {limits}, for {self.percentile:g} % of requests"

    def holds(self, record: RequestRecord) -> bool | None:
        """Whether one request holds every limit; None for a cancelled one that had broken none when it was cut off."""
        if record.status == "failed":
            return False
        if record.is_completed:
            return not self._breaks(record)
        return False if self._breaks(record) else None

    def _breaks(self, record: RequestRecord) -> bool:
        waited = record.latency_ms
        ttft = record.ttft_ms if record.ttft_ms is not None else waited
        tpot = record.tpot_ms
        return (
            (self.ttft_ms is not None and ttft > self.ttft_ms)
            or (self.itl_ms is not None and tpot is not None and tpot > self.itl_ms)
            or (self.request_latency_ms is not None and waited > self.request_latency_ms)
        )


def judge(slo: Slo, records: Sequence[RequestRecord], metrics: dict[str, Any], duration_s: float) -> dict[str, Any]:
    """The verdict of one run: attainment with its interval, goodput (holding requests a second), met, and each limit.

    `decided` is False when the sample is too small to tell: Wilson's interval of the attainment holds the target.
    """
    verdicts = [v for v in map(slo.holds, records) if v is not None]
    good, total, target = sum(verdicts), len(verdicts), slo.percentile / 100
    low, high = statistics.wilson_interval(good, total)
    limits: dict[str, Any] = {}
    for name, limit in slo.limits.items():
        values = metrics[name]["ordered"]
        observed = statistics.percentile(values, slo.percentile) if values else None
        limits[name] = {"limit": limit, "observed": observed, "met": observed is not None and observed <= limit}
    # A run of one-token answers has no gap, and so none that breaks the limit.
    gaps_met = limits.get("itl_ms", {"met": True})["met"] or not metrics["itl_ms"]["ordered"]
    attainment = good / total if total else 0.0
    return {
        "attainment": attainment,
        "attainment_ci95": [low, high],
        "goodput": good / duration_s if duration_s > 0 else 0.0,
        "met": total > 0 and attainment >= target and gaps_met,
        "decided": not low <= target <= high if slo.percentile < 100 else high < 1,
        "requests_judged": total,
        "limits": limits,
    }


def requests_to_decide(slo: Slo) -> int | None:
    """How many requests, all holding, it takes until Wilson's interval excludes the target; None for 100 %."""
    target = slo.percentile / 100
    if target >= 1:
        return None
    z = 1.959964
    return math.floor(target * z * z / (1 - target)) + 1


def highest_holding(runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The highest load that meets the objective with every lower measured one of its kind meeting it too.

    Of open loops the rate in requests a second; of closed loops the number of streams. None when nothing was judged.
    """
    judged = [r for r in runs if r["slo"]["met"] is not None]
    if not judged:
        return None
    found: dict[str, Any] = {}
    for key, kinds in (("rate", ("constant", "poisson")), ("streams", ("synchronous", "concurrent"))):
        chosen = sorted((r for r in judged if r["profile"] in kinds), key=lambda r: r[key])
        if chosen and not (key == "streams" and "rate" in found and len(chosen) == 1):  # a sweep's floor is no capacity
            best = None
            for run in chosen:
                if not run["slo"]["met"]:
                    break
                best = run[key]
            found[key] = best
            found[f"{key}_tried_up_to"] = chosen[-1][key]
    return found
