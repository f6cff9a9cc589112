"""The real scheduler under Poisson arrivals, in virtual time: a step takes as long as a formula says."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.core.cache_groups import CacheGroup, KVCacheSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig, Step

BLOCK_SIZE, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 512, 128


def llama_8b_seconds(step: Step) -> float:
    """An 8B model's step on one large GPU: 4.2 ms, and 23 us a prompt token."""
    return 4.2e-3 + 23e-6 * (step.num_tokens - step.num_decodes)


def llama_8b_measured(step: Step) -> float:
    """The same as fitted to a load of 64 requests a second on an H200: every token counts, and so do 131 kB of KV."""
    kv_tokens = sum(item.start for item in step.requests[: step.num_decodes])
    return 4.2e-3 + 21e-6 * step.num_tokens + kv_tokens * 131e3 / 4.3e12


@dataclass
class Load:
    """What came of a load. Times are seconds; a request's place in the lists is its place in order of arrival."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    end: float = 0.0  # the last token of all
    waiting: list[tuple[float, int]] = field(default_factory=list)  # (time, prompt tokens that wait) at each step
    num_tokens: int = 0


def arrivals(rate: float, seconds: float, seed: int = 0) -> list[float]:
    rng, now, times = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(rate)) < seconds:
        times.append(now)
    return times


def simulate(times: list[float], step_seconds: Callable[[Step], float] = llama_8b_seconds, **config: Any) -> Load:
    """Serve requests that arrive at `times`, launching a step while the one before it runs, as the engine does."""
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 1024, "block_size": BLOCK_SIZE}
    limits["max_steps_in_flight"] = 2
    scheduler = Scheduler(SchedulerConfig(**limits | config), [CacheGroup(KVCacheSpec("full", 1, 8, None), [0])], 8192)
    load, first, last, now, free_at = Load(), {}, {}, 0.0, 0.0
    requests: list[Request] = []
    in_flight: deque[tuple[Step, float, float]] = deque()  # with its duration and the time of its end
    while len(requests) < len(times) or scheduler.has_work():
        while len(requests) < len(times) and (times[len(requests)] <= now or not scheduler.has_work()):
            due = len(requests)
            now = max(now, times[due])
            requests.append(Request(str(due), [due] * PROMPT_TOKENS, SamplingParams(max_tokens=OUTPUT_TOKENS)))
            scheduler.add(requests[-1])
        step = scheduler.schedule()
        if step is not None:
            load.waiting.append((now, scheduler.states.waiting.num_prompt_tokens))
            free_at = max(now, free_at) + step_seconds(step)
            in_flight.append((step, step_seconds(step), free_at))
            if len(in_flight) < scheduler.config.max_steps_in_flight:
                continue
        step, seconds, now = in_flight.popleft()
        scheduler.observe(step, seconds)
        moved = scheduler.update(step, {item.request.request_id: [7] for item in step.requests if item.sample})
        load.num_tokens += len(moved)
        for request in moved:
            first.setdefault(request, now)
            last[request] = now
    for arrived, request in zip(times, requests, strict=True):
        load.ttft.append(first[request] - arrived)
        load.tpot.append((last[request] - first[request]) / (OUTPUT_TOKENS - 1))
    load.end = now
    return load


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
