"""When requests are sent: closed loops (a fixed number in flight), open loops (times fixed beforehand), sweeps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.config import BenchConfig

THROUGHPUT_CONCURRENCY = 256
SWEEP_EXTENSIONS = 3
SWEEP_GROWTH = 1.2

RunReport = dict[str, Any]


@dataclass(frozen=True)
class RunPlan:
    """One run: `streams` requests always in flight, or the `arrivals` of an open loop in seconds from the start."""

    profile: str
    rate: float | None = None
    streams: int | None = None
    arrivals: Callable[[], Iterator[float]] | None = None

    @property
    def is_open_loop(self) -> bool:
        return self.arrivals is not None

    @property
    def title(self) -> str:
        """Such as "poisson at 4/s" or "concurrent, 8 streams"."""
        if self.is_open_loop:
            return f"{self.profile} at {self.rate:.4g}/s"
        return f"{self.profile}, {self.streams} streams" if self.profile == "concurrent" else self.profile


def constant_arrivals(rate: float) -> Iterator[float]:
    """Request i at i / rate."""
    return (i / rate for i in itertools.count())


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """A Poisson process: independent exponential gaps of mean 1 / rate, all from one generator.

    One stream matters: generators of equal seed in several workers repeat each gap and make bursts that no user makes.
    """
    rng = random.Random(f"arrivals/{seed}/{rate!r}")
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def constant(rate: float) -> RunPlan:
    return RunPlan("constant", rate, arrivals=lambda: constant_arrivals(rate))


def poisson(rate: float, seed: int) -> RunPlan:
    return RunPlan("poisson", rate, arrivals=lambda: poisson_arrivals(rate, seed))


def replay(times: Sequence[float], speed: float) -> RunPlan:
    """A recording's own times, `speed` times as fast; its rate is the mean over the recording."""
    seconds = times[-1] / speed
    rate = len(times) / seconds if seconds > 0 else float(len(times))
    return RunPlan("replay", rate, arrivals=lambda: (t / speed for t in times))


def plans(config: BenchConfig, trace_times: Sequence[float] = ()) -> Generator[RunPlan, RunReport, None]:
    """The runs of a profile, one after the other; `send` the finished run's report to get the next plan.

    `trace_times` are the seconds at which requests came, for replay. Raises UserError at once for a profile whose rates
    are missing or make no sense.
    """
    rates = config.rates()
    return _generate(config, rates, trace_times)


def count_runs(config: BenchConfig) -> int:
    """How many runs a profile has (a sweep may end earlier or add a few)."""
    return config.sweep_size if config.profile == "sweep" else max(1, len(config.rates()))


def _generate(
    config: BenchConfig, rates: list[float], trace_times: Sequence[float]
) -> Generator[RunPlan, RunReport, None]:
    throughput = RunPlan("throughput", streams=config.max_concurrency or THROUGHPUT_CONCURRENCY)
    if config.profile == "synchronous":
        yield RunPlan("synchronous", streams=1)
    elif config.profile == "throughput":
        yield throughput
    elif config.profile == "sweep":
        yield from _sweep(config.sweep_size, throughput)
    elif config.profile == "replay":
        yield replay(trace_times, rates[0] if rates else 1.0)
        return
    for rate in rates:
        if config.profile == "concurrent":
            yield RunPlan("concurrent", rate, streams=int(rate))
        elif config.profile == "constant":
            yield constant(rate)
        elif config.profile == "poisson":
            yield poisson(rate, config.seed)


def _sweep(size: int, throughput: RunPlan) -> Generator[RunPlan, RunReport, None]:
    """Floor, ceiling, and constant rates between them.

    The ceiling is measured while the pipeline fills and drains, so it comes out low: while the highest rate is still
    served without a growing queue, higher ones are added. After two overloaded rates in a row the rest would only
    repeat what is known, and the sweep ends.
    """
    floor = (yield RunPlan("synchronous", streams=1))["requests_per_second"] or 0.0
    ceiling = (yield throughput)["requests_per_second"] or 0.0
    if ceiling <= 0:
        return
    rates = sweep_rates(floor, ceiling, size - 2)
    num_overloaded = 0
    while rates:
        rate = rates.pop(0)
        report = yield constant(rate)
        num_overloaded = num_overloaded + 1 if report["overloaded"] else 0
        if num_overloaded == 2 or not report["requests"]["completed"]:
            return
        if not rates and not num_overloaded and rate < ceiling * SWEEP_GROWTH**SWEEP_EXTENSIONS * 0.999:
            rates.append(rate * SWEEP_GROWTH)


def sweep_rates(floor: float, ceiling: float, count: int) -> list[float]:
    """`count` rates evenly above the synchronous rate up to the measured throughput (included).

    Where batching gains nothing, so that the ceiling is no higher than the floor, they spread below the ceiling.
    """
    if ceiling <= floor * 1.05:
        return [ceiling * (i + 1) / count for i in range(count)]
    return [floor + (ceiling - floor) * (i + 1) / count for i in range(count)]
