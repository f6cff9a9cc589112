"""Samples the server's own /metrics beside the load: how much ran, how much waited, how full the KV cache was."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from octavo.bench.http1 import HttpClient, RequestError

# Our name -> the servers' names, without a prefix such as "vllm:" (Octavo and vLLM, older vLLM, llama.cpp, SGLang).
GAUGES = {
    "running": ("num_requests_running", "requests_processing", "num_running_reqs"),
    "waiting": ("num_requests_waiting", "requests_deferred", "num_queue_reqs"),
    "kv_cache_usage": (
        "kv_cache_usage_perc", "gpu_cache_usage_perc", "cpu_cache_usage_perc", "kv_cache_usage_ratio", "token_usage",
    ),
}  # fmt: skip
COUNTERS = {
    "prefix_cache_queries": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
    "prefix_cache_hits": ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
    "preemptions": ("num_preemptions_total",),
    "prompt_tokens": ("prompt_tokens_total",),
    "generation_tokens": ("generation_tokens_total", "tokens_predicted_total"),
}
FIRST_DELAY = 0.1  # so that short runs have a sample inside too


def parse_prometheus(text: str) -> dict[str, float]:
    """Sums of each metric over its labels, from Prometheus' text format, under the names without a prefix.

    A server may offer a figure twice, as "vllm:x" and under the alias "x"; then the prefixed one counts.
    """
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name = line.split("{", 1)[0].split(" ", 1)[0]
        rest = line.rpartition("}")[2] if "{" in line else line.partition(" ")[2]
        fields = rest.split()
        with contextlib.suppress(ValueError, IndexError):  # a line that is no sample is not ours to judge
            totals[name] = totals.get(name, 0.0) + float(fields[0])
    by_prefix = sorted(totals.items(), key=lambda item: ":" in item[0])
    return {name.rpartition(":")[2]: value for name, value in by_prefix}


@dataclass
class Sample:
    """What /metrics said at `time_ns`; a key is missing where the server has no such metric."""

    time_ns: int
    values: dict[str, float]


@dataclass
class MetricsScraper:
    """Asks for /metrics every `interval` seconds while its context is open. Without such a route `error` says why."""

    http: HttpClient
    interval: float
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> MetricsScraper:
        if self.interval > 0:
            await self.sample()
            if self.error is None:
                self._task = asyncio.get_running_loop().create_task(self._loop())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            await self.sample()

    async def _loop(self) -> None:
        delay = min(self.interval, FIRST_DELAY)
        while True:
            await asyncio.sleep(delay)
            await self.sample()
            delay = self.interval

    async def sample(self) -> None:
        """Take one sample; a failure is kept in `error` and the load goes on."""
        try:
            response = await self.http.request("GET", "/metrics", timeout=5.0)
        except RequestError as error:
            self.error = f"/metrics: {error}"
            return
        if response.status != 200:
            self.error = f"/metrics answered {response.status}"
            return
        totals = parse_prometheus(response.body.decode("utf-8", "replace"))
        values: dict[str, float] = {}
        for key, names in (GAUGES | COUNTERS).items():
            for name in names:
                if name in totals:
                    values[key] = totals[name]
                    break
        if values:
            self.samples.append(Sample(perf_counter_ns(), values))
        else:
            self.error = "/metrics has none of the names that are understood"

    def summary(self, start_ns: int) -> dict[str, Any] | None:
        """Mean and peak of each gauge, growth of each counter, and the series for a plot; None without samples.

        The first and the last sample frame the run: they belong to the counters' growth, not to the gauges' mean.
        """
        if not self.samples:
            return None
        result: dict[str, Any] = {"samples": len(self.samples)}
        for key in GAUGES:
            values = _present(self.samples[1:-1], key)
            if values:
                result[key] = {"mean": sum(values) / len(values), "max": max(values)}
        for key in COUNTERS:
            values = _present(self.samples, key)
            if values:
                result[key] = values[-1] - values[0]
        if result.get("prefix_cache_queries"):
            result["prefix_cache_hit_rate"] = result["prefix_cache_hits"] / result["prefix_cache_queries"]
        step = max(1, len(self.samples) // 300)
        result["series"] = {
            "time_s": [round((s.time_ns - start_ns) / 1e9, 3) for s in self.samples[::step]],
            **{key: [s.values.get(key) for s in self.samples[::step]] for key in GAUGES if key in result},
        }
        return result


def _present(samples: Iterable[Sample], key: str) -> list[float]:
    return [sample.values[key] for sample in samples if key in sample.values]
