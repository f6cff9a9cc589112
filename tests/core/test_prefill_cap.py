"""The cap on prefills beside decodes: its rules, the model of step times, and loads in virtual time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_simulation import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    arrivals,
    llama_8b_measured,
    llama_8b_seconds,
    percentile,
    simulate,
)
from scheduler_helpers import request, run, scheduler, shape

from octavo.core.prefill_cap import BacklogCap, FixedCap, TargetGapCap, prefill_cap_of
from octavo.core.scheduler import SchedulerConfig
from octavo.core.step import Step
from octavo.core.step_time import StepTimeModel
from octavo.errors import UserError

GPU_RANGE = (512, 2048)


def config(**more: object) -> SchedulerConfig:
    return SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 8192, "max_model_len": 64} | more)  # type: ignore[arg-type]


def test_a_number_wins_over_an_objective_and_that_over_a_range() -> None:
    everything = {"max_prefill_tokens_with_decodes": 7, "target_itl_ms": 20.0, "prefill_cap_range": (1, 2)}
    assert isinstance(prefill_cap_of(config(**everything)), FixedCap)
    assert prefill_cap_of(config(**everything)).tokens(1, 0, 100) == 7
    assert isinstance(prefill_cap_of(config(**everything | {"max_prefill_tokens_with_decodes": None})), TargetGapCap)
    assert isinstance(prefill_cap_of(config(prefill_cap_range=(1, 2))), BacklogCap)
    assert prefill_cap_of(config()).tokens(1, 0, 100) == 0


@pytest.mark.parametrize(
    "wrong", [{"target_itl_ms": 0.0}, {"prefill_cap_range": (0, 5)}, {"prefill_cap_range": (3, 2)}]
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        config(**wrong)


def test_the_cap_follows_the_backlog() -> None:
    target = scheduler(num_blocks=100, max_num_batched_tokens=40, prefill_cap_range=(4, 12))
    target.add(request("a", 4))
    run(target)
    target.add(request("b", 20))
    target.add(request("c", 16))
    assert shape(run(target)) == [("a", 4, 1), ("b", 0, 12)]  # 36 wait: a half is more than the upper bound
    target.abort("c")
    assert shape(run(target)) == [("a", 5, 1), ("b", 12, 4)]  # 8 tokens of b are left
    assert shape(run(target)) == [("a", 6, 1), ("b", 16, 4)]


def test_a_request_that_leaves_the_queue_leaves_the_backlog() -> None:
    target = scheduler(max_num_seqs=1)
    for name, size in (("a", 5), ("b", 7), ("c", 11)):
        target.add(request(name, size))
    assert target.states.waiting.num_prompt_tokens == 23
    run(target)
    assert target.states.waiting.num_prompt_tokens == 18
    target.abort("c")
    assert target.states.waiting.num_prompt_tokens == 7
    target.abort("a")
    target.abort("b")
    assert target.states.waiting.num_prompt_tokens == 0


costs = st.tuples(st.floats(1e-4, 2e-2), st.floats(1e-6, 1e-3), st.floats(0, 1e-4), st.floats(0, 1e-7))


@given(costs, st.integers(0, 2**32))
def test_the_model_finds_what_a_step_costs(cost: tuple[float, ...], seed: int) -> None:
    a, b, c, d = cost
    rng, model = random.Random(seed), StepTimeModel()
    for _ in range(60):
        prefill, decodes = rng.choice((0, 32, 64, 256, 1024)), rng.randint(1, 200)
        kv = decodes * rng.randint(100, 1000)
        model.observe(a + b * prefill + c * decodes + d * kv, prefill, decodes, kv)
    expected = a + b * 300 + c * 50 + d * 20000
    assert model.predict(300, 50, 20000) == pytest.approx(expected, rel=0.05)
    assert model.prefill_within(expected, 50, 20000) == pytest.approx(300, rel=0.1, abs=0.05 * expected / b)


def test_decodes_alone_do_not_wear_away_what_a_prompt_token_costs() -> None:
    model = StepTimeModel()
    for i in range(40):
        model.observe(4e-3 + 23e-6 * 64 * (i % 5), 64 * (i % 5), 20, 10_000)
    for _ in range(5000):
        model.observe(4e-3, 0, 20, 10_000)
    assert model.predict(1000, 20, 10_000) == pytest.approx(27e-3, rel=0.1)


def test_the_model_follows_a_device_that_slows_down() -> None:
    model = StepTimeModel()
    for factor in (1, 2):
        for i in range(400):
            model.observe(factor * (4e-3 + 23e-6 * 64 * (i % 5)), 64 * (i % 5), 20, 10_000)
    assert model.predict(256, 20, 10_000) == pytest.approx(2 * (4e-3 + 23e-6 * 256), rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 8192), st.integers(0, 256), st.integers(0, 10**6))))
def test_whatever_was_observed_the_cap_keeps_its_bounds(steps: list[tuple[float, int, int, int]]) -> None:
    cap = TargetGapCap(0.02, 2048)
    for seconds, prefill, decodes, kv in steps:
        assert 1 <= cap.tokens(decodes, kv, 100) <= 2048
        cap.observe(Step(0, num_tokens=prefill + decodes, num_decodes=decodes, kv_tokens=kv), seconds)


@pytest.mark.parametrize("target_ms", [8.0, 15.0, 30.0])
def test_steps_keep_the_gap_that_was_asked_for(target_ms: float) -> None:
    gaps = []

    def seconds(step: Step) -> float:
        if step.num_decodes:
            gaps.append(llama_8b_seconds(step))
        return llama_8b_seconds(step)

    load = simulate(arrivals(40, 5), seconds, target_itl_ms=target_ms)
    assert load.num_tokens == len(load.ttft) * OUTPUT_TOKENS
    assert percentile(gaps, 0.99) <= 1.02e-3 * target_ms
    assert max(gaps) >= 0.9e-3 * target_ms, "the cap is lower than the objective allows"


def test_32_requests_a_second_have_short_gaps_and_first_tokens() -> None:
    load = simulate(arrivals(32, 15), prefill_cap_range=GPU_RANGE)
    assert percentile(load.ttft, 0.99) < 0.120
    assert percentile(load.tpot, 0.99) < 0.015


def test_48_requests_a_second_are_stable() -> None:
    load = simulate(arrivals(48, 15), prefill_cap_range=GPU_RANGE)
    met = [first <= 0.2 and gap <= 0.05 for first, gap in zip(load.ttft, load.tpot, strict=True)]
    assert sum(met) >= 0.95 * len(met)
    late = [tokens for time, tokens in load.waiting if 10 < time < 15]
    assert max(late) <= 10 * PROMPT_TOKENS, "the queue grows"


def slow_seconds(step: Step) -> float:
    """A device that cannot keep up with 64 requests a second: some 57."""
    return 5.5e-3 + 26e-6 * (step.num_tokens - step.num_decodes) + 8e-6 * step.num_decodes


def test_past_what_a_device_sustains_more_running_requests_do_more() -> None:
    times = arrivals(64, 15, seed=1)
    rates = {}
    for most in (256, 512):
        load = simulate(times, llama_8b_measured, prefill_cap_range=GPU_RANGE, max_num_seqs=most)
        rates[most] = load.num_tokens / (load.end - times[0])
    assert rates[512] > 1.03 * rates[256]
    assert rates[512] > 7000


@pytest.mark.parametrize("seconds", [llama_8b_seconds, llama_8b_measured, slow_seconds])
def test_after_an_overload_a_request_is_answered_at_once(seconds) -> None:
    times = arrivals(64, 15)
    load = simulate([*times, 20.0], seconds, prefill_cap_range=GPU_RANGE)
    assert load.ttft[-1] < 0.1
    assert load.num_tokens - OUTPUT_TOKENS == len(times) * OUTPUT_TOKENS
    assert max(tokens for time, tokens in load.waiting if time > 19) <= PROMPT_TOKENS, "nothing is left of the overload"
