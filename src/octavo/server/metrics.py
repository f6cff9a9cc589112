"""Prometheus metrics: vLLM's names and labels, and the seed names that the course uses as aliases.

What the engine counts (queues, cache, tokens) is read from its newest snapshot when somebody asks; what one request
experienced is observed here as its tokens pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.core.sampling_params import SamplingParams
from octavo.engine.messages import EngineInfo, EngineOutput, EngineStats
from octavo.server.histogram import PlainHistogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
ENGINE_INDEX = "0"  # one engine a server

# seconds
_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
# vLLM's begin at 10 ms, which says nothing about small models
_ITL = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SHORT_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.2, *_LATENCY)
_N = (1, 2, 5, 10, 20)

# name without prefix: (help, how to read it from the snapshot); the seed aliases are the same names without "vllm:"
_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": (
        "Requests in the engine's batch, the most of the last half second",
        lambda s: s.peak_running,
    ),
    "num_requests_waiting": ("Requests that wait for room", lambda s: s.waiting),
    "kv_cache_usage_perc": (
        "Share of the KV cache in use, 0 to 1, the most of the last half second",
        lambda s: s.peak_kv_usage,
    ),
    "gpu_cache_usage_perc": ("Older name of kv_cache_usage_perc, whatever the device", lambda s: s.peak_kv_usage),
    "cpu_cache_usage_perc": ("Older name of kv_cache_usage_perc, whatever the device", lambda s: s.peak_kv_usage),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prompt_tokens": ("Prompt tokens of the requests that were prefilled", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens generated", lambda s: s.generation_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", lambda s: s.prefix_queries),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
    "num_preemptions": ("Requests put back to the queue for lack of KV blocks", lambda s: s.preemptions),
}
_NO_ALIAS = frozenset({"num_preemptions"})


class EngineCollector(Collector):
    """Reads the engine's snapshot at each scrape."""

    def __init__(self, stats: Callable[[], EngineStats], labels: tuple[str, str]) -> None:
        self._stats = stats
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, read) in table.items():
                for prefix in ("vllm:",) if name in _NO_ALIAS else ("vllm:", ""):
                    family = kind(prefix + name, text, labels=LABELS)
                    family.add_metric(self._labels, read(stats))
                    yield family


class ServerMetrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str, info: EngineInfo, stats: Callable[[], EngineStats]) -> None:
        self._values = (model_name, ENGINE_INDEX)
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats, self._values))
        ProcessCollector(registry=self.registry)
        tokens = _token_buckets(info.max_model_len)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Gap between two tokens", _ITL)
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean gap between a request's tokens", _ITL
        )
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token", _LATENCY)
        self.queue_time = self._histogram("request_queue_time_seconds", "Waiting for the engine", _SHORT_LATENCY)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Start to first token", _SHORT_LATENCY)
        self.decode_time = self._histogram("request_decode_time_seconds", "First to last token", _LATENCY)
        self.inference_time = self._histogram("request_inference_time_seconds", "Start to last token", _LATENCY)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", tokens)
        self.generation_tokens = self._histogram("request_generation_tokens", "Generated tokens of a request", tokens)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request", tokens)
        self.params_n = self._histogram("request_params_n", "n of a request", _N)
        self.prompt_tokens_cached = Counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that the prefix cache spared", LABELS, registry=self.registry
        ).labels(*self._values)
        self._success = Counter(
            "vllm:request_success", "Sequences that ended", (*LABELS, "finished_reason"), registry=self.registry
        )
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests refused with 503", ("model_name", "reason"), registry=self.registry
        )
        self.http_requests = Counter(
            "http_requests", "HTTP requests answered", ("handler", "method", "status"), registry=self.registry
        )
        self._add_cache_info(info)

    def start_request(self, prompt_tokens: int, params: SamplingParams) -> RequestTimer:
        """Begin to measure one sequence that arrives now."""
        return RequestTimer(self, prompt_tokens, params)

    def count_finish(self, reason: str) -> None:
        self._success.labels(*self._values, reason).inc()

    def count_embedding(self, prompt_tokens: int, seconds: float, reason: str) -> None:
        """One input of an embedding request ended, `seconds` after its arrival."""
        self.count_finish(reason)
        if reason == "stop":
            self.prompt_tokens.observe(prompt_tokens)
            self.e2e_latency.observe(seconds)

    def count_rejection(self) -> None:
        self._rejections.labels(self._values[0], "max_num_queued_reqs").inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> PlainHistogram:
        histogram = PlainHistogram("vllm:" + name, text, buckets, LABELS, self._values)
        self.registry.register(histogram)
        return histogram

    def _add_cache_info(self, info: EngineInfo) -> None:
        fields = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "kv_bytes_per_token": info.kv_bytes_per_token,
            "max_model_len": info.max_model_len,
            "engine": ENGINE_INDEX,
        }
        gauge = Gauge("vllm:cache_config_info", "Layout of the KV cache", tuple(fields), registry=self.registry)
        gauge.labels(*map(str, fields.values())).set(1)


class RequestTimer:
    """What one sequence experienced. `add` takes each output of the engine, `finish` the reason of its end."""

    __slots__ = ("_first", "_last", "_metrics", "_num_prompt", "_num_tokens", "_params", "_queue_s", "_start")

    def __init__(self, metrics: ServerMetrics, num_prompt: int, params: SamplingParams) -> None:
        self._metrics = metrics
        self._num_prompt = num_prompt
        self._params = params
        self._start = time.perf_counter()
        self._first = self._last = 0.0
        self._num_tokens = 0
        self._queue_s = 0.0

    def add(self, output: EngineOutput) -> None:
        if not output.token_ids:
            return
        now = time.perf_counter()
        if not self._num_tokens:
            self._begin(now, output)
        else:
            self._metrics.inter_token_latency.observe((now - self._last) / len(output.token_ids))
        self._last = now
        self._num_tokens += len(output.token_ids)

    def finish(self, reason: str) -> None:
        metrics = self._metrics
        metrics.count_finish(reason)
        if not self._num_tokens:
            return
        metrics.prompt_tokens.observe(self._num_prompt)
        metrics.generation_tokens.observe(self._num_tokens)
        metrics.params_max_tokens.observe(self._params.max_tokens or 0)
        metrics.e2e_latency.observe(self._last - self._start)
        metrics.decode_time.observe(self._last - self._first)
        metrics.inference_time.observe(max(0.0, self._last - self._start - self._queue_s))
        if self._num_tokens > 1:
            metrics.time_per_output_token.observe((self._last - self._first) / (self._num_tokens - 1))

    def _begin(self, now: float, output: EngineOutput) -> None:
        self._first = now
        self._metrics.time_to_first_token.observe(now - self._start)
        self._metrics.prompt_tokens_cached.inc(output.num_cached_tokens)
        if output.queue_s is not None:
            self._queue_s = output.queue_s
            self._metrics.queue_time.observe(output.queue_s)
        if output.prefill_s is not None:
            self._metrics.prefill_time.observe(output.prefill_s)


def _token_buckets(max_model_len: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to the context length."""
    buckets: list[float] = []
    power = 1
    while power <= max_model_len:
        buckets += [step * power for step in (1, 2, 5) if step * power <= max_model_len]
        power *= 10
    return buckets
