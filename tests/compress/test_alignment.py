"""GPTQ that aims at the outputs of the model as it came: its second stream, its statistics and what it is good for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_gptq_solver import correlated_inputs
from tiny_models import tiny_model, token_samples

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.blocks import find_blocks
from octavo.compress.exact_stream import ExactStream
from octavo.compress.gptq_solver import GPTQSettings, solve
from octavo.compress.oneshot import oneshot
from octavo.compress.rounding import Grid, dequantize
from octavo.compress.statistics import InputStatistics
from octavo.compress.walker import BlockWalker
from octavo.compress.watching import run_watched
from octavo.modifiers import GPTQModifier

QUERIES = "model.layers.{}.self_attn.q_proj"
FOUR = WeightScheme(4, group_size=32)


def test_aligned_outputs_are_nearer_to_those_on_the_exact_inputs() -> None:
    exact = correlated_inputs(64, tokens=800)
    inputs = exact + 0.15 * torch.randn(800, 64, generator=torch.Generator().manual_seed(1)) @ torch.randn(64, 64) / 8
    hessian, drift = inputs.t() @ inputs, (exact - inputs).t() @ inputs
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(2))
    errors = []
    with_more_rows = torch.cat((weight, torch.randn(80, 64)))
    for given, rows in ((None, weight), (drift, weight), (drift, with_more_rows)):
        solution = solve([rows], hessian, FOUR, GPTQSettings(), torch.float32, drift=given)[0]
        solution.codes, solution.grid = solution.codes[:24], Grid(solution.grid.scale[:24])
        outputs = inputs @ dequantize(solution.codes, solution.grid, FOUR).t()
        errors.append(float((outputs - exact @ weight.t()).square().sum()))
    best = torch.linalg.lstsq(inputs, exact @ weight.t()).solution
    least = float((inputs @ best - exact @ weight.t()).square().sum())
    assert errors[1] < 0.93 * errors[0]
    assert errors[1] > least
    assert errors[2] == pytest.approx(errors[1], rel=0.02)


def test_drift_is_summed_and_given_up_where_exact_inputs_are_missing() -> None:
    exact, inputs = torch.randn(60, 16), torch.randn(60, 16)
    statistics = InputStatistics(16, {"hessian", "drift"})
    for those, these in zip(exact.split(25), inputs.split(25), strict=True):
        statistics.add(these, those)
    torch.testing.assert_close(statistics.drift(), (exact - inputs).t() @ inputs)
    spoiled = inputs.clone()
    spoiled[7, 3] = torch.nan
    left_out = InputStatistics(16, {"hessian", "drift"})
    left_out.add(spoiled, exact)
    keep = torch.arange(60) != 7
    torch.testing.assert_close(left_out.drift(), (exact - inputs)[keep].t() @ inputs[keep])
    statistics.add(inputs)
    assert statistics.drift() is None
    statistics.add(inputs, exact)
    assert statistics.drift() is None


@torch.no_grad()
def test_the_exact_stream_is_that_of_the_model_as_it_came() -> None:
    model = tiny_model("llama")
    samples = torch.tensor(token_samples())
    expected = model(samples, output_hidden_states=True).hidden_states
    walker = BlockWalker(model, find_blocks(model))
    walker.start([samples[:4], samples[4:]])
    exact, (first, second) = ExactStream(walker), model.model.layers
    for batch, part in enumerate((slice(0, 4), slice(4, 6))):
        inputs = exact.advance(0, batch, [{QUERIES.format(0): first.self_attn.q_proj}])
        torch.testing.assert_close(inputs[QUERIES.format(0)], first.input_layernorm(expected[0][part]))
    first.self_attn.q_proj.weight.mul_(0.5)  # compressed
    for batch, part in enumerate((slice(0, 4), slice(4, 6))):
        walker.advance(0, batch)
        assert not torch.allclose(walker.hidden[batch], expected[1][part], atol=1e-3)
        seen = exact.advance(1, batch, [{QUERIES.format(1): second.self_attn.q_proj}])[QUERIES.format(1)]
        torch.testing.assert_close(seen, second.input_layernorm(expected[1][part]), rtol=1e-4, atol=1e-5)


def divergence(model: Any, other: Any) -> float:
    """Mean KL divergence of `other` from `model` on tokens that calibration did not see."""
    ids = torch.tensor(token_samples(24, 24, seed=17))
    with torch.inference_mode():
        exact, found = model(ids).logits.log_softmax(-1), other(ids).logits.log_softmax(-1)
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def test_aligned_models_are_nearer_to_the_original_in_one_batch_and_in_many() -> None:
    results = []
    for align, batch_size in ((False, None), (True, None), (True, 16)):
        model = tiny_model("llama", num_hidden_layers=4, initializer_range=0.1)
        recipe = GPTQModifier(scheme="W3A16", group_size=32, ignore=["lm_head"], align=align)
        oneshot(model, recipe=recipe, dataset=token_samples(48, 24), batch_size=batch_size)
        results.append(divergence(tiny_model("llama", num_hidden_layers=4, initializer_range=0.1), model))
    assert results[1] < 0.92 * results[0]
    # What runs first in a block is changed before the rest is observed, whatever the batches.
    assert results[2] == pytest.approx(results[1], rel=0.05)


@torch.no_grad()
def test_a_pass_ends_when_it_has_seen_what_it_was_for() -> None:
    block = tiny_model("llama").model.layers[0]
    seen: list[str] = []
    layers = {"o": block.self_attn.o_proj, "up": block.mlp.up_proj}
    for whole in (False, True):
        ran: list[bool] = []
        handle = block.mlp.down_proj.register_forward_pre_hook(lambda *_, ran=ran: ran.append(True))
        output = run_watched(
            lambda: block(torch.randn(2, 5, 64), position_embeddings=(torch.ones(1, 5, 16), torch.zeros(1, 5, 16))),
            layers,
            lambda name, _: seen.append(name),
            whole,
        )
        handle.remove()
        assert (output is not None) == bool(ran) == whole
    assert seen == ["o", "up", "o", "up"]


def test_experts_are_not_aligned_but_compressed(tmp_path: Path) -> None:
    model = tiny_model("mixtral", num_local_experts=2, num_experts_per_tok=1)
    recipe = GPTQModifier(scheme="W8A16", group_size=32, ignore=["lm_head", "re:.*gate$"])
    oneshot(model, recipe=recipe, dataset=token_samples(), output_dir=tmp_path)
    assert any("experts" in name for name in load_file(tmp_path / "model.safetensors"))
