"""Short ways to a scheduler, a request and a step, for cases worked out by hand."""

from __future__ import annotations

from typing import Any

from octavo.core.cache_groups import CacheGroup, KVCacheSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig, Step


def scheduler(num_blocks: int = 33, windows: tuple[int | None, ...] = (None,), **config: Any) -> Scheduler:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 4} | config
    groups = [
        CacheGroup(KVCacheSpec("full" if window is None else "sliding", 1, 8, window), [i])
        for i, window in enumerate(windows)
    ]
    return Scheduler(SchedulerConfig(**values), groups, num_blocks)


def request(name: str, prompt: int | list[int], max_tokens: int | None = 20, **more: Any) -> Request:
    """A prompt given as a length has tokens that no other such prompt has."""
    tokens = prompt if isinstance(prompt, list) else [1000 * ord(name[0]) + i for i in range(prompt)]
    fields = {k: more.pop(k) for k in ("priority", "cache_salt", "eos_token_ids", "arrival_time") if k in more}
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens, **more), **fields)


def shape(step: Step | None) -> list[tuple[str, int, int]]:
    assert step is not None
    return [(item.request.request_id, item.start, item.num_tokens) for item in step.requests]


def run(target: Scheduler, token: int = 7) -> Step | None:
    step = target.schedule()
    if step is not None:
        target.update(step, {item.request.request_id: [token] for item in step.requests if item.sample})
    return step
