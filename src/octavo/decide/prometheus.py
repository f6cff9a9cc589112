"""The server's /metrics: one look, or a series of looks beside a load."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx

from octavo.bench.metrics_scrape import parse_prometheus
from octavo.errors import OctavoError


def read_metrics(url: str, client: httpx.Client | None = None) -> dict[str, float]:
    """One look at the server's metrics: name without `vllm:` -> value, summed over label sets."""
    answer = (client or httpx).get(f"{url}/metrics", timeout=5.0)
    answer.raise_for_status()
    # the same metrics are there once more without the prefix, under the names that older texts use
    return parse_prometheus("\n".join(line for line in answer.text.splitlines() if line.startswith("vllm:")))


@dataclass(frozen=True)
class CacheLayout:
    """The KV cache of a running server, as its `cache_config_info` states it."""

    num_blocks: int
    block_size: int
    bytes_per_token: int
    max_model_len: int


def read_cache_layout(url: str) -> CacheLayout:
    """OctavoError when the server does not say how its cache is laid out."""
    text = httpx.get(f"{url}/metrics", timeout=5.0).text
    line = next((entry for entry in text.splitlines() if entry.startswith("vllm:cache_config_info{")), "")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    try:
        return CacheLayout(
            num_blocks=int(labels["num_gpu_blocks"]),
            block_size=int(labels["block_size"]),
            bytes_per_token=int(labels["kv_bytes_per_token"]),
            max_model_len=int(labels["max_model_len"]),
        )
    except (KeyError, ValueError) as error:
        raise OctavoError(f"{url}/metrics does not describe the KV cache in cache_config_info: {error}") from error


@dataclass
class Sample:
    """One look: seconds since the sampler began, and the values of the watched metrics."""

    seconds: float
    values: dict[str, float]


@dataclass
class MetricsSampler:
    """Watches metrics in a thread while a block runs; `samples` has the series."""

    url: str
    names: tuple[str, ...]
    interval: float = 0.02
    samples: list[Sample] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._begin = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="metrics-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        with httpx.Client() as client:
            while not self._stop.is_set():
                try:
                    seen = read_metrics(self.url, client)
                except httpx.HTTPError:  # a look is missing then; a server that is gone fails the questions themselves
                    self._stop.wait(self.interval)
                    continue
                values = {name: seen.get(name, 0.0) for name in self.names}
                self.samples.append(Sample(time.monotonic() - self._begin, values))
                self._stop.wait(self.interval)
