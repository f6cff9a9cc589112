"""Two steps in flight on state that the device keeps: the same tokens as one step at a time, whatever comes between."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.engine.config import EngineConfig
from octavo.engine.device_runner import DeviceRunner
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineOutput, EngineRequest
from octavo.engine.packing import PromptShape
from octavo.engine.prompt_graphs import PromptGraphs

PROMPTS = ["Hello there", "The quick brown fox jumps over the lazy dog. " * 4, "a", "1 2 3 4 5 6 7 8 9"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), dtype="float32")


@pytest.fixture(scope="module")
def ahead(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), dtype="float32", async_scheduling=True)


@pytest.fixture
def engine(tiny_llama: Path) -> Engine:
    return Engine(EngineConfig(model=str(tiny_llama), dtype="float32", async_scheduling=True, max_num_seqs=4))


def tokens(llm: LLM, params, prompts=PROMPTS) -> list[list[list[int]]]:
    return [[o.token_ids for o in answer.outputs] for answer in llm.generate(prompts, params, use_tqdm=False)]


def finish(engine: Engine) -> dict[str, list[EngineOutput]]:
    """Run the engine dry; the outputs of each request."""
    outputs: dict[str, list[EngineOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def joined(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"max_prefill_tokens_with_decodes": 3},
        {"max_num_seqs": 1},
        {"enable_prefix_caching": False},
        {"block_size": 8},
        {"kv_cache_memory_bytes": 20 * 16 * 512, "max_model_len": 300, "max_num_seqs": 4},
        {"model_impl": "transformers"},
    ],
    ids=lambda kwargs: ",".join(kwargs),
)
def test_tokens_do_not_depend_on_launching_ahead(tiny_llama: Path, plain: LLM, kwargs) -> None:
    expected = tokens(plain, GREEDY)
    with LLM(str(tiny_llama), dtype="float32", async_scheduling=True, **kwargs) as llm:
        assert tokens(llm, GREEDY) == expected
        if "kv_cache_memory_bytes" in kwargs:
            assert llm.engine.stats().preemptions > 0
        assert tokens(llm, GREEDY) == expected  # out of the prefix cache now


class Calls(PromptGraphs):
    """In place of graphs, which a CPU has not: what they would replay is called, on the same views."""

    def __init__(self, runner: DeviceRunner) -> None:
        super().__init__(runner._model, runner._state, None)
        self._shapes = runner.prompt_shapes()
        self.used: set[PromptShape] = set()

    def run_body(self, shape: PromptShape) -> torch.Tensor:
        self.used.add(shape)
        return self._body(shape)


class NoDecodes:
    def padded_shape(self, num_requests: int, num_shared: int = 0) -> None:
        return None


@pytest.mark.parametrize("max_num_seqs", [4, 20])
@pytest.mark.parametrize("extra", [{}, {"logprobs": 2, "prompt_logprobs": 1}, {"repetition_penalty": 1.3}], ids=str)
def test_padded_prompts_give_the_tokens_of_the_steps_themselves(tiny_llama: Path, max_num_seqs: int, extra) -> None:
    def answers(is_padded: bool) -> tuple[dict[str, list[int]], list[float], set[PromptShape]]:
        settings = {"async_scheduling": True, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 64}
        engine = Engine(EngineConfig(model=str(tiny_llama), dtype="float32", **settings))
        runner = engine._runner
        assert isinstance(runner, DeviceRunner)
        calls = Calls(runner)
        if is_padded:
            runner._graphs, runner._prompt_graphs = NoDecodes(), calls
        for i in range(22):
            params = SamplingParams(temperature=0.0, max_tokens=2 + i % 5, ignore_eos=True, **extra)
            prompt = [3 + (i * 7 + j) % 90 for j in range(2 if i < 18 else 9 * i % 50)]
            engine.add(EngineRequest(f"{i:02}", prompt, params))
        outputs = finish(engine)
        entries = [part for name in sorted(outputs) for o in outputs[name] for part in (o.prompt_logprobs, o.logprobs)]
        values = [value.logprob for part in entries for entry in part or [] for value in (entry or {}).values()]
        return {name: joined(parts) for name, parts in outputs.items()}, values, calls.used

    tokens, logprobs, used = answers(is_padded=True)
    expected, expected_logprobs, unused = answers(is_padded=False)
    assert tokens == expected and logprobs == pytest.approx(expected_logprobs, abs=1e-4)
    assert bool(logprobs) == ("logprobs" in extra)
    assert len(used) > 1 and max_num_seqs in {shape.max_requests for shape in used} and not unused


def test_more_requests_than_rows_of_unequal_length(tiny_llama: Path, plain: LLM) -> None:
    prompts = [[3 + i] * (1 + 5 * (i % 7)) for i in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 9, ignore_eos=True) for i in range(20)]
    expected = tokens(plain, params, prompts)
    with LLM(str(tiny_llama), dtype="float32", async_scheduling=True, max_num_seqs=3) as llm:
        assert tokens(llm, params, prompts) == expected


def test_a_stop_token_ends_a_request_though_its_next_step_is_launched(plain: LLM, ahead: LLM) -> None:
    free = tokens(plain, GREEDY)
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop_token_ids=[free[i][0][3 + i]])
        for i in range(len(PROMPTS))
    ]
    assert tokens(ahead, params) == tokens(plain, params)
    assert not ahead.engine.has_work


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"logit_bias": {7: 4.0}},
        {"min_tokens": 5, "stop_token_ids": list(range(3, 200))},
        {"allowed_token_ids": [4, 5, 6, 7]},
        {"logprobs": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_sampling_that_needs_tokens_on_the_host(plain: LLM, ahead: LLM, change) -> None:
    special = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **change)
    params = [GREEDY, special, GREEDY, special]
    assert tokens(ahead, params) == tokens(plain, params)


def test_logprobs_are_those_of_one_step_at_a_time(plain: LLM, ahead: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    for prompt in PROMPTS:
        expected, found = (llm.generate(prompt, params, use_tqdm=False)[0] for llm in (plain, ahead))
        assert found.prompt_logprobs == expected.prompt_logprobs
        assert found.outputs[0].logprobs == expected.outputs[0].logprobs


def test_prompt_logprobs_alone_come_while_steps_are_in_flight(plain: LLM, ahead: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1, ignore_eos=True), GREEDY]
    expected, found = (llm.generate(PROMPTS[:2], params, use_tqdm=False) for llm in (plain, ahead))
    assert found[0].prompt_logprobs == expected[0].prompt_logprobs
    assert found[1].outputs[0].token_ids == expected[1].outputs[0].token_ids


def test_draws_do_not_depend_on_the_batch(tiny_llama: Path, ahead: LLM) -> None:
    params = [
        SamplingParams(temperature=t, top_p=p, top_k=k, seed=i, max_tokens=12, ignore_eos=True)
        for i, (t, p, k) in enumerate([(1.0, 1.0, 0), (0.7, 0.9, 0), (1.3, 1.0, 5), (0.0, 1.0, 0)])
    ]
    together = tokens(ahead, params)
    assert together == [tokens(ahead, p, [prompt])[0] for p, prompt in zip(params, PROMPTS, strict=True)]
    other_seed = SamplingParams(temperature=1.0, seed=99, max_tokens=12, ignore_eos=True)
    assert together[0] != tokens(ahead, other_seed, PROMPTS[:1])[0]


def test_a_step_is_launched_before_the_one_before_it_is_collected(engine: Engine, monkeypatch) -> None:
    order: list[tuple[str, int]] = []
    launch, collect = engine._runner.launch, engine._runner.collect
    monkeypatch.setattr(engine._runner, "launch", lambda step: (order.append(("launch", step.id)), launch(step))[1])
    monkeypatch.setattr(
        engine._runner, "collect", lambda flying: (order.append(("collect", flying.step.id)), collect(flying))[1]
    )
    engine.add(EngineRequest("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)))
    finish(engine)
    assert order == [("launch", 0), ("launch", 1), ("collect", 0), ("launch", 2), ("collect", 1), ("collect", 2)]


def test_an_abort_between_launch_and_collect_disturbs_nobody(engine: Engine, plain: LLM) -> None:
    prompts = [[5, 6, 7], [8, 9], [10] * 40]
    expected = tokens(plain, GREEDY, prompts)
    for name, prompt in zip("abc", prompts, strict=True):
        engine.add(EngineRequest(name, prompt, GREEDY))
    collected = engine.step() + engine.step() + engine.step()
    engine.abort("b")
    engine.add(EngineRequest("b", prompts[1], GREEDY))  # the name is free again, while the old one's step is in flight
    engine.add(EngineRequest("d", prompts[1], GREEDY))  # takes the row that was given up
    outputs = finish(engine)
    for name, wanted in (("a", expected[0]), ("c", expected[2])):
        before = [output for output in collected if output.request_id == name]
        assert [joined(before + outputs[name])] == wanted
    assert [joined(outputs["b"])] == [joined(outputs["d"])] == expected[1]


def test_a_step_that_cannot_be_launched_fails_its_requests_alone(engine: Engine, monkeypatch, plain: LLM) -> None:
    launch = engine._runner.launch
    calls = 0

    def fail_third(step):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("no memory left")
        return launch(step)

    monkeypatch.setattr(engine._runner, "launch", fail_third)
    engine.add(EngineRequest("a", [5, 6, 7], GREEDY))
    outputs = finish(engine)["a"]
    assert outputs[-1].finish_reason == "error" and "no memory left" in (outputs[-1].error or "")
    engine.add(EngineRequest("b", [5, 6, 7], GREEDY))
    assert [joined(finish(engine)["b"])] == tokens(plain, GREEDY, [[5, 6, 7]])[0]


def test_a_step_that_cannot_be_collected_fails_its_requests_alone(engine: Engine, monkeypatch, plain: LLM) -> None:
    collect = engine._runner.collect
    calls = 0

    def fail_third(in_flight):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("a kernel failed")
        return collect(in_flight)

    monkeypatch.setattr(engine._runner, "collect", fail_third)
    engine.add(EngineRequest("a", [5, 6, 7], GREEDY))
    outputs = finish(engine)["a"]
    assert len(joined(outputs)) == 2 and "a kernel failed" in (outputs[-1].error or "")
    engine.add(EngineRequest("b", [5, 6, 7], GREEDY))
    assert [joined(finish(engine)["b"])] == tokens(plain, GREEDY, [[5, 6, 7]])[0]


def test_a_row_of_nan_fails_alone(engine: Engine, monkeypatch, plain: LLM) -> None:
    compute_logits = engine._runner._model.compute_logits

    def break_one(hidden):
        logits = compute_logits(hidden)
        if len(logits) == 2:  # the steps that both requests are in
            logits[1, 3] = math.nan
        return logits

    monkeypatch.setattr(engine._runner._model, "compute_logits", break_one)
    engine.add(EngineRequest("a", [5, 6, 7], GREEDY))
    engine.add(EngineRequest("b", [8, 9], GREEDY))
    outputs = finish(engine)
    ends = sorted(name for name in "ab" if "NaN" in (outputs[name][-1].error or ""))
    assert len(ends) == 1
    other = "b" if ends == ["a"] else "a"
    assert [joined(outputs[other])] == tokens(plain, GREEDY, [{"a": [5, 6, 7], "b": [8, 9]}[other]])[0]


def test_statistics_count_what_was_delivered(engine: Engine) -> None:
    for name, length in (("a", 3), ("b", 7)):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        engine.add(EngineRequest(name, [5, 6, 7], params))
    finish(engine)
    stats = engine.stats()
    assert (stats.generation_tokens, stats.prompt_tokens) == (10, 6)


@pytest.mark.parametrize("deterministic", [False, True])
def test_fp8_pages_on_a_cpu_are_near_and_the_same_however_a_prompt_comes(
    tiny_llama: Path, plain: LLM, deterministic: bool
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    prompts = [[3 + (i * 7 + j) % 90 for j in range(20 + 9 * i)] for i in range(3)]

    def values(llm: LLM) -> torch.Tensor:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        entries = [entry for output in outputs for entry in output.prompt_logprobs or [] if entry is not None]
        return torch.tensor([value.logprob for entry in entries for value in entry.values()])

    settings = {"dtype": "float32", "device": "cpu", "kv_cache_dtype": "fp8", "deterministic": deterministic}
    with (
        LLM(str(tiny_llama), **settings) as whole,
        LLM(str(tiny_llama), max_num_batched_tokens=11, max_num_seqs=3, **settings) as chunked,
    ):
        found, exact = values(whole), values(plain)
        assert 0 < (found - exact).abs().mean() < 0.05 * exact.abs().mean()
        assert torch.allclose(values(chunked), found, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_answers_as_one_step_at_a_time_does(tiny_llama: Path, plain: LLM, seed: int) -> None:
    """Shared prefixes, preemptions, aborts, stop tokens and draws, with more requests than rows."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 250) for _ in range(48)]
    prompts, params = [], []
    for i in range(24):
        own = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 60))]
        prompts.append(shared[: rng.choice([0, 16, 40, 48])] + own)
        sampling = rng.choice(
            [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.2, "top_k": 9}]
        )
        stops = [rng.randrange(3, 250) for _ in range(6)] if rng.random() < 0.5 else None
        length = rng.randrange(1, 80)
        params.append(SamplingParams(**sampling, max_tokens=length, seed=i, stop_token_ids=stops, ignore_eos=True))
    expected = [answer[0] for answer in tokens(plain, params, prompts)]
    engine = Engine(
        EngineConfig(
            model=str(tiny_llama),
            dtype="float32",
            async_scheduling=True,
            max_num_seqs=5,
            max_num_batched_tokens=40,
            kv_cache_memory_bytes=17 * 16 * 512,
            max_model_len=200,
        )
    )
    found: dict[str, list[int]] = {str(i): [] for i in range(24)}
    waiting, aborted = list(range(24)), set()
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.7:
            i = waiting.pop(0)
            engine.add(EngineRequest(str(i), prompts[i], params[i]))
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.token_ids
        if rng.random() < 0.03 and engine._requests:
            name = rng.choice(sorted(engine._requests))
            engine.abort(name)
            aborted.add(name)
    assert engine.stats().preemptions > 0
    for name, tokens_of in found.items():
        wanted = expected[int(name)]
        assert tokens_of == (wanted[: len(tokens_of)] if name in aborted else wanted)
