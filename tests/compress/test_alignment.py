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
from octavo.compress.rounding import dequantize
from octavo.compress.statistics import InputStatistics
from octavo.compress.walker import BlockWalker
from octavo.modifiers import GPTQModifier

FOUR = WeightScheme(4, group_size=32)


def test_aligned_outputs_are_nearer_to_those_on_the_exact_inputs() -> None:
    exact = correlated_inputs(64, tokens=800)
    inputs = exact + 0.15 * torch.randn(800, 64, generator=torch.Generator().manual_seed(1)) @ torch.randn(64, 64) / 8
    hessian, drift = inputs.t() @ inputs, (exact - inputs).t() @ inputs
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(2))
    errors = []
    for given in (None, drift):
        solution = solve([weight], hessian, FOUR, GPTQSettings(), torch.float32, drift=given)[0]
        outputs = inputs @ dequantize(solution.codes, solution.grid, FOUR).t()
        errors.append(float((outputs - exact @ weight.t()).square().sum()))
    best = torch.linalg.lstsq(inputs, exact @ weight.t()).solution
    least = float((inputs @ best - exact @ weight.t()).square().sum())
    assert errors[1] < 0.93 * errors[0]
    assert errors[1] > least


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
    blocks = find_blocks(model)
    walker = BlockWalker(model, blocks)
    walker.start([samples[:4], samples[4:]])
    exact = ExactStream(walker)
    layer = blocks.modules[0].self_attn.q_proj
    for batch, part in enumerate((slice(0, 4), slice(4, 6))):
        inputs = exact.advance(0, batch, [{"q": layer}])
        torch.testing.assert_close(inputs["q"], blocks.modules[0].input_layernorm(expected[0][part]))
    layer.weight.mul_(0.5)  # compressed
    for batch, part in enumerate((slice(0, 4), slice(4, 6))):
        walker.advance(0, batch)
        assert not torch.allclose(walker.hidden[batch], expected[1][part], atol=1e-3)
        seen = exact.advance(1, batch, [{"q": blocks.modules[1].self_attn.q_proj}])["q"]
        torch.testing.assert_close(seen, blocks.modules[1].input_layernorm(expected[1][part]), rtol=1e-4, atol=1e-5)


def divergence(model: Any, other: Any) -> float:
    """Mean KL divergence of `other` from `model` on tokens that calibration did not see."""
    ids = torch.tensor(token_samples(24, 24, seed=17))
    with torch.inference_mode():
        exact, found = model(ids).logits.log_softmax(-1), other(ids).logits.log_softmax(-1)
    return float((exact.exp() * (exact - found)).sum(-1).mean())


@pytest.mark.parametrize("batch_size", [None, 8])
def test_aligned_models_are_nearer_to_the_original(batch_size: int | None) -> None:
    results = []
    for align in (False, True):
        model = tiny_model("llama", num_hidden_layers=4, initializer_range=0.1)
        recipe = GPTQModifier(scheme="W3A16", group_size=32, ignore=["lm_head"], align=align)
        oneshot(model, recipe=recipe, dataset=token_samples(48, 24), batch_size=batch_size)
        results.append(divergence(tiny_model("llama", num_hidden_layers=4, initializer_range=0.1), model))
    assert results[1] < 0.97 * results[0]


def test_experts_are_not_aligned_but_compressed(tmp_path: Path) -> None:
    model = tiny_model("mixtral", num_local_experts=2, num_experts_per_tok=1)
    recipe = GPTQModifier(scheme="W8A16", group_size=32, ignore=["lm_head", "re:.*gate$"])
    oneshot(model, recipe=recipe, dataset=token_samples(), output_dir=tmp_path)
    assert any("experts" in name for name in load_file(tmp_path / "model.safetensors"))
