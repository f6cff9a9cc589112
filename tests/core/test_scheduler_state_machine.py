"""The scheduler machine under Hypothesis, which shrinks what it finds, and under seeded random events."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_machine import NUM_TOKENS, SchedulerMachine, Shape, sampling
from scheduler_soak import WINDOWS, soak

TOKENS = st.integers(0, NUM_TOKENS - 1)
CHOICE = st.integers(0, 50)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    windows = draw(st.sampled_from(WINDOWS))
    block_size = draw(st.sampled_from((1, 2, 4)))
    max_model_len = draw(st.integers(4, 32))
    max_num_seqs = draw(st.integers(1, 5))
    alone = len(windows) * (-(-max_model_len // block_size) + 1)
    return Shape(
        windows=windows,
        num_blocks=draw(st.integers(1 + alone // 2, 2 + alone * 2)),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 16)),
        max_model_len=max_model_len,
        prefill_cap=draw(st.sampled_from((0, 1, 4))),
        policy=draw(st.sampled_from(("fcfs", "priority"))),
        caching=draw(st.booleans() | st.just(True)),
        depth=draw(st.integers(1, 3)),
    )


class SchedulerStateMachine(RuleBasedStateMachine):
    """Rules are the machine's events, invariants its check; at the end everything must drain."""

    machine: SchedulerMachine

    @initialize(shape=shapes())
    def start(self, shape: Shape) -> None:
        self.machine = SchedulerMachine(shape)
        self.prompts: list[list[int]] = []

    @precondition(lambda self: len(self.machine.truths) < 10)
    @rule(
        prefix=CHOICE,
        num_shared=CHOICE,
        suffix=st.lists(TOKENS, min_size=1, max_size=12),
        max_tokens=st.none() | st.integers(1, 20),
        min_tokens=st.integers(0, 1),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from((None, None, None, 0)),
        priority=st.integers(-1, 1),
        salt=st.sampled_from((None, None, "a", "bb")),
    )
    def add(
        self,
        prefix: int,
        num_shared: int,
        suffix: list[int],
        max_tokens: int | None,
        min_tokens: int,
        ignore_eos: bool,
        prompt_logprobs: int | None,
        priority: int,
        salt: str | None,
    ) -> None:
        shared = self.prompts[prefix % len(self.prompts)][:num_shared] if self.prompts else []
        prompt = [*shared, *suffix]
        self.prompts.append(prompt)
        params = sampling(max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos, prompt_logprobs=prompt_logprobs)
        self.machine.add(prompt, params, priority, salt)

    @rule()
    def schedule(self) -> None:
        self.machine.schedule()

    @precondition(lambda self: self.machine.steps)
    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=4), accept=st.integers(0, 4))
    def update(self, tokens: list[int], accept: int) -> None:
        self.machine.update(tokens, accept)

    @precondition(lambda self: self.machine.truths)
    @rule(choice=CHOICE)
    def abort(self, choice: int) -> None:
        self.machine.abort(choice)

    @precondition(lambda self: self.machine.truths)
    @rule(choice=CHOICE)
    def stop(self, choice: int) -> None:
        self.machine.stop(choice)

    @precondition(lambda self: self.machine.steps)
    @rule(choice=CHOICE)
    def fail(self, choice: int) -> None:
        self.machine.fail(choice)

    @precondition(lambda self: self.machine.truths)
    @rule(choice=CHOICE, drafts=st.lists(TOKENS, min_size=1, max_size=5))
    def propose(self, choice: int, drafts: list[int]) -> None:
        self.machine.propose(choice, drafts)

    @rule()
    def clear_cache(self) -> None:
        self.machine.clear_cache()

    @invariant()
    def holds(self) -> None:
        self.machine.check()

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.machine.drain([1, 2, 3])


TestScheduler = SchedulerStateMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_random_events_keep_every_invariant() -> None:
    totals: dict[str, int] = {}
    assert soak(30_000, seed=100_000, totals=totals) >= 30_000
    assert totals["preemptions"] > 100
    assert totals["prefix_hits"] > 1000  # the events do reach what they are meant to test


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_millions_of_random_events() -> None:
    assert soak(3_000_000, seed=1_000_000) >= 3_000_000
