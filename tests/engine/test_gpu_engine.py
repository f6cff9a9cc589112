"""The engine on a GPU: a graph is bit by bit the calls in it, a launch waits for nothing, a step costs few calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import Step
from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest
from octavo.engine.packing import DecodeShape, PromptShape
from octavo.engine.prompt_graphs import PromptGraphs
from octavo.engine.runner import InFlight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def make(folder: Path, **settings: Any) -> Engine:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    settings = {"load_format": "dummy", "kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 24} | settings
    return Engine(EngineConfig(model=str(folder), skip_tokenizer_init=True, **settings))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def decoding(engine: Engine) -> Iterator[Engine]:
    """Three requests that decode, with the first new blocks behind them."""
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    for i in range(3):
        engine.add(EngineRequest(f"d{i}", [5 + i] * 17, params))
    for _ in range(8):
        engine.step()
    yield engine
    for i in range(3):
        engine.abort(f"d{i}")
    engine.drain()


def answers(engine: Engine, params: list[SamplingParams], first: int = 0) -> dict[str, list[int]]:
    """Tokens of prompts of several lengths; `first` tells those of one test from another's."""
    found: dict[str, list[int]] = {}
    for i, p in enumerate(params):
        engine.add(EngineRequest(str(i), [(first + 7 * i + j) % 2000 for j in range(1 + 37 * i)], p))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def test_every_decode_size_was_captured(engine: Engine) -> None:
    graphs = engine._runner._graphs  # type: ignore[attr-defined]
    assert graphs.failure is None
    shapes = [graphs.padded_shape(n) for n in (1, 3, 4, 5, 17, 24, 25)]
    assert shapes == [*[DecodeShape(size) for size in (1, 4, 4, 8, 24, 24)], None]
    assert [graphs.padded_shape(n, 512) for n in (2, 16, 17)] == [DecodeShape(size, 512) for size in (16, 16, 24)]


def test_decodes_that_begin_alike_take_their_graph_and_give_the_same_rows(engine: Engine, monkeypatch) -> None:
    runner: Any = engine._runner
    launch, used, errors = runner.launch, set(), []

    @torch.inference_mode()
    def compare(step: Step) -> InFlight:
        shape, in_flight = runner._padding_of(step), launch(step)
        if isinstance(shape, DecodeShape) and shape.num_shared:
            used.add(shape)
            shared = runner._graphs.run_body(shape)[: step.num_tokens].float().clone()
            single = runner._model(*runner._state.prepare(runner._state.send(step))).float()
            errors.append(float((shared - single).norm() / single.norm()))
        return in_flight

    monkeypatch.setattr(runner, "launch", compare)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for i in range(20):
        engine.add(EngineRequest(f"alike-{i}", [(3 * j) % 2000 for j in range(2100)] + [i] * (1 + 9 * i), params))
    while engine.has_work:
        engine.step()
    assert used == {DecodeShape(24, 2096)} and len(errors) > 10
    assert max(errors) < 0.02


SERIAL = count()  # no prompt is found in the prefix cache


@pytest.mark.parametrize("lengths", [[32], [2, 40, 7], [16], [100] * 4, [2] * 20, [500]], ids=str)
@pytest.mark.parametrize("with_decodes", [False, True])
def test_a_replayed_prompt_gives_the_bits_of_the_calls_in_it(
    request: pytest.FixtureRequest, engine: Engine, lengths: list[int], with_decodes: bool, monkeypatch
) -> None:
    if with_decodes:
        request.getfixturevalue("decoding")
    runner: Any = engine._runner
    graphs, state, launch = runner._prompt_graphs, runner._state, runner.launch
    assert graphs.failure is None
    seen = []

    @torch.inference_mode()
    def compare(step: Step) -> InFlight:
        shape, in_flight = runner._padding_of(step), launch(step)
        if isinstance(shape, PromptShape):
            called, replayed = (run(shape)[: step.num_tokens].clone() for run in (graphs._body, graphs.run_body))
            assert called.isfinite().all() and torch.equal(called, replayed)
            single = runner._model(*state.prepare(state.send(step)))
            assert (single - called).float().norm() < 0.03 * called.float().norm()
            seen.append((step.num_tokens, step.num_decodes))
        return in_flight

    monkeypatch.setattr(runner, "launch", compare)
    waiting = set()
    for length in lengths:
        serial = next(SERIAL)
        waiting.add(f"p{serial}")
        tokens = [(31 * serial + 7 * j * (serial + 1)) % 2000 for j in range(length)]
        engine.add(EngineRequest(f"p{serial}", tokens, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)))
    while waiting:
        for output in engine.step():
            assert output.error is None
            if output.finish_reason is not None:
                waiting.discard(output.request_id)
    assert seen and all((num_decodes > 0) >= with_decodes for _, num_decodes in seen)


def prompt_logprobs(engine: Engine) -> tuple[torch.Tensor, dict[str, list[int]]]:
    """Of three prompts: the log-probability of each token, and the answers."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    prompts = [[(7 * i + j) % 2000 for j in range(2 + 37 * i)] for i in range(3)]
    for i, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(i), prompt, params))
    values: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            prompt = prompts[int(output.request_id)]
            for token, entry in zip(prompt, output.prompt_logprobs or [], strict=False):
                values.setdefault(output.request_id, []).extend([] if entry is None else [entry[token].logprob])
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return torch.tensor([value for name in sorted(values) for value in values[name]]), tokens


@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_and_their_log_probabilities_are_those_without_graphs(tmp_path: Path, deterministic: bool) -> None:
    settings = {"deterministic": True} if deterministic else {}
    replayed, tokens = prompt_logprobs(make(tmp_path, **settings))
    called, expected = prompt_logprobs(make(tmp_path, enforce_eager=True, **settings))
    assert len(replayed) == 1 + 38 + 75
    if deterministic:
        assert torch.equal(replayed, called) and tokens == expected
    else:
        torch.testing.assert_close(replayed, called, rtol=0.02, atol=0.05)


def test_prompts_that_cannot_be_captured_are_launched_call_by_call(tmp_path: Path, monkeypatch) -> None:
    def fail(self: PromptGraphs, shape: PromptShape) -> torch.Tensor:
        raise RuntimeError("no such step")

    monkeypatch.setattr(PromptGraphs, "_body", fail)
    engine = make(tmp_path)
    runner: Any = engine._runner
    assert runner._graphs.failure is None and "no such step" in runner._prompt_graphs.failure
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert len(answers(engine, [params])["0"]) == 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_launching_ahead_does_not_change_tokens(engine: Engine, tmp_path: Path, temperature: float) -> None:
    params = [
        SamplingParams(temperature=temperature, top_p=0.95, seed=i, max_tokens=24, ignore_eos=True) for i in range(4)
    ]
    first = 500 + round(100 * temperature)  # a hit in the prefix cache would make other steps, and so other last bits
    found = answers(engine, params, first)
    assert found == answers(make(tmp_path, async_scheduling=False), params, first)
    assert len({tuple(tokens) for tokens in found.values()}) == len(params)


def test_a_graph_gives_the_bits_of_the_calls_in_it(decoding: Engine) -> None:
    decoding.drain()
    graphs = decoding._runner._graphs  # type: ignore[attr-defined]
    with torch.inference_mode():  # the packed vector still holds the last step, of three requests
        called = graphs._body(decoding._runner._state.decode_of(DecodeShape(4)))[:3].clone()  # type: ignore[attr-defined]
        replayed = graphs.run_body(DecodeShape(4))[:3].clone()
    assert called.isfinite().all() and len(called.unique()) > 100
    assert torch.equal(called, replayed)


def test_without_graphs_the_answers_are_as_long(tmp_path: Path) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)] * 5
    engine = make(tmp_path, enforce_eager=True)
    assert engine._runner._graphs is None  # type: ignore[attr-defined]
    assert [len(tokens) for tokens in answers(engine, params).values()] == [9] * 5


def test_a_launch_waits_for_nothing(decoding: Engine) -> None:
    scheduler, runner = decoding._scheduler, decoding._runner
    decoding.drain()
    flying = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            step = scheduler.schedule()
            assert step is not None
            flying.append(runner.launch(step))
            if len(flying) == 2:
                oldest = flying.pop(0)
                scheduler.update(oldest.step, runner.collect(oldest).tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        for in_flight in flying:
            scheduler.update(in_flight.step, runner.collect(in_flight).tokens)


def test_a_prefill_waits_for_nothing_either(engine: Engine) -> None:
    engine.add(EngineRequest("p", [3] * 100, SamplingParams(temperature=0.7, max_tokens=2, ignore_eos=True)))
    step = engine._scheduler.schedule()
    assert step is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        in_flight = engine._runner.launch(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine._scheduler.update(step, engine._runner.collect(in_flight).tokens)
    while engine.has_work:
        engine.step()


def test_a_decode_step_is_one_copy_each_way_and_two_graphs(decoding: Engine) -> None:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    steps = 4
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as result:
        for _ in range(steps):
            decoding.step()
        torch.cuda.synchronize()
    calls = Counter[str]()
    for row in result.key_averages():
        calls[row.key] += row.count
    assert calls["cudaGraphLaunch"] == 2 * steps
    copies = {way: sum(n for name, n in calls.items() if f"Memcpy {way}" in name) for way in ("HtoD", "DtoH")}
    assert copies == {"HtoD": steps, "DtoH": steps}


def test_a_model_that_looks_at_its_data_runs_without_graphs(tmp_path: Path, monkeypatch) -> None:
    from octavo.models.decoder import DecoderLM

    forward = DecoderLM.forward
    monkeypatch.setattr(DecoderLM, "forward", lambda self, ids, *rest: forward(self, ids * int(ids.max() >= 0), *rest))
    engine = make(tmp_path, max_num_seqs=4)
    assert engine._runner._graphs is None  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert len(answers(engine, [params])["0"]) == 4


def test_fp8_pages_answer(tmp_path: Path) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 3
    assert {len(tokens) for tokens in answers(make(tmp_path, kv_cache_dtype="fp8"), params).values()} == {12}
