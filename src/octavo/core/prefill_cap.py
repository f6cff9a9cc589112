"""How many prompt tokens a step may take that also decodes.

A prompt token in such a step makes every running stream wait; too few of them, and prompts queue up. What is right
depends on the device and on the load, so there are three rules:

- a fixed number (`FixedCap`), for small devices, and for operators who know it;
- a share of the backlog (`BacklogCap`), for a device that does thousands of prompt tokens in the time of a few decodes:
  light load keeps gaps short, overload runs efficient steps;
- whatever keeps a step within a gap that the operator states (`TargetGapCap`), from a model of the step's time.

The arithmetic for an 8B model on one GPU, where a step takes 4.2 ms and 23 us a prompt token: with the cap C, prompts
are taken in at no more than C / (4.2 ms + 23 us C). That is 11,300 tokens a second for C = 64 (22 requests of 512
tokens), 25,400 for 256 (49 requests), 32,000 for 512 (62 requests) and 39,900 for 2,048 (78 requests). So 32 and 48
requests a second are stable at a low end of 512, whose steps take 16 ms, and 64 are from C = 560 on.

In a simulation of that model with two steps in flight (tests/core/load_simulation.py) the mean gap of a request did not
depend on the cap, since the prompts have to be computed anyway, and the first token came later the longer a prompt was
spread: at 64 requests a second the median was 77, 96 and 127 ms for the whole backlog, a half and a quarter of it. A
half costs little of that and lets one long prompt stall the streams for half as long.

Past what the device sustains, the cap matters little and the number of running requests much. With steps of 4.2 ms,
21 us a token and the reading of the KV cache (tests/core/load_simulation.py: `llama_8b_measured`), which gives what was
measured at 64 requests a second with 256 running requests within 2 %, upper bounds of 2,048 and 16,384 differ by 0.1 %
in tokens a second; 512 running requests give 4 % more, since each of a step's 4.2 ms serves twice as many.
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.step import Step
from octavo.core.step_time import StepTimeModel

BACKLOG_SHARE = 2  # steps over which a backlog is spread
LEAST_TARGET_TOKENS = 32  # so that prompts move on, however small the gap that was asked for


class PrefillCap(Protocol):
    """A rule for `Scheduler`: asked at each step, told how long each one took."""

    def tokens(self, num_decodes: int, kv_tokens: int, backlog: int) -> int:
        """Prefill tokens at most, 0 for no cap, of a step with `num_decodes` > 0.

        kv_tokens: tokens that the cache holds for running requests. backlog: prompt tokens that are not computed yet,
        of running and waiting requests.
        """

    def observe(self, step: Step, seconds: float) -> None:
        """A step took so long."""


class FixedCap:
    """Always the same number; 0 for no cap."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def tokens(self, num_decodes: int, kv_tokens: int, backlog: int) -> int:
        return self._num_tokens

    def observe(self, step: Step, seconds: float) -> None:
        """Nothing depends on it."""


class BacklogCap:
    """Half of the backlog, between two bounds."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    def tokens(self, num_decodes: int, kv_tokens: int, backlog: int) -> int:
        return min(self._high, max(self._low, backlog // BACKLOG_SHARE))

    def observe(self, step: Step, seconds: float) -> None:
        """Nothing depends on it."""


class TargetGapCap:
    """As many as keep the step within `target_seconds`, by a model that is fitted to the steps so far.

    A model of few steps knows little, so the cap begins at the least and at most doubles from one step that was
    observed to the next. `high` bounds it.
    """

    def __init__(self, target_seconds: float, high: int) -> None:
        self.model = StepTimeModel()
        self._target = target_seconds
        self._high = high
        self._trusted = LEAST_TARGET_TOKENS

    def tokens(self, num_decodes: int, kv_tokens: int, backlog: int) -> int:
        wanted = self.model.prefill_within(self._target, num_decodes, kv_tokens)
        return max(1, min(self._high, self._trusted, max(LEAST_TARGET_TOKENS, wanted)))

    def observe(self, step: Step, seconds: float) -> None:
        num_prefill = step.num_tokens - step.num_decodes
        self.model.observe(seconds, num_prefill, step.num_decodes, step.kv_tokens)
        if 2 * num_prefill >= self._trusted:  # it has been there, or nearly
            self._trusted = min(self._high, 2 * self._trusted)


def prefill_cap_of(config: SchedulerConfig) -> PrefillCap:
    """The rule that a configuration asks for: a number wins over an objective, and that over a range."""
    if config.max_prefill_tokens_with_decodes is not None:
        return FixedCap(config.max_prefill_tokens_with_decodes)
    if config.target_itl_ms is not None:
        return TargetGapCap(config.target_itl_ms / 1000, config.max_num_batched_tokens)
    return BacklogCap(*config.prefill_cap_range) if config.prefill_cap_range else FixedCap(0)
