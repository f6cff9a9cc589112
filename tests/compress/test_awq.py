"""AWQModifier: the search finds the least error, the chain is better with it, and what cannot be scaled is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_mappings import family_model
from test_smoothing import outlier_inputs, rand
from tiny_models import token_samples

from octavo import oneshot
from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.command import modifiers_of
from octavo.compress.config import CompressConfig
from octavo.compress.mappings import Smoothing
from octavo.compress.recipe import dump_recipe, parse_recipe
from octavo.compress.simulation import FutureLayer, weight_error
from octavo.compress.smoothing import awq_candidates, relative_magnitudes
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError
from octavo.modifiers import AWQModifier, GPTQModifier, QuantizationModifier, SmoothQuantModifier

W4 = {"scheme": "W4A16", "group_size": 32, "ignore": ["lm_head"]}


def statistics(inputs: torch.Tensor) -> InputStatistics:
    seen = InputStatistics(inputs.shape[1], ("hessian", "absmean"))
    seen.add(inputs)
    return seen


def test_the_best_candidate_is_taken() -> None:
    inputs, weights = outlier_inputs(), [rand(24, 64, seed=1), rand(8, 64, seed=2)]
    layers = [FutureLayer(weight, WeightScheme(3, group_size=32), "imatrix_signed") for weight in weights]
    smoothing = Smoothing("norm", ("a.weight", "b.weight"), "a")
    factors = AWQModifier(n_grid=8).factors(smoothing, layers, statistics(inputs))
    assert factors is not None
    hessian = inputs.t() @ inputs
    candidates = awq_candidates(inputs.abs().mean(dim=0), relative_magnitudes(weights, 32), 8, "both")
    errors = [weight_error(layers, hessian, candidate) for candidate in candidates]
    assert weight_error(layers, hessian, factors) == pytest.approx(min(errors), rel=1e-3)
    assert min(errors) < 0.9 * errors[0]


def test_nothing_is_scaled_where_ones_are_best() -> None:
    inputs = torch.eye(64) * 10
    layers = [FutureLayer(torch.ones(8, 64), WeightScheme(4, group_size=32), "imatrix_signed")]
    assert AWQModifier().factors(Smoothing("norm", ("a.weight",), "a"), layers, statistics(inputs)) is None


def chain_error(tmp_path: Path, *chain: Any) -> tuple[float, dict[str, Any]]:
    """Squared error of the logits, and the report."""
    model = family_model("llama")
    model.model.layers[0].input_layernorm.weight.data[::8] *= 30
    model.model.layers[0].post_attention_layernorm.weight.data[::8] *= 30
    tokens = torch.tensor(token_samples(4, seed=8))
    before = model(tokens, use_cache=False).logits
    oneshot(model, dataset=token_samples(12), recipe=list(chain), output_dir=tmp_path / "out")
    report = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    return float((model(tokens, use_cache=False).logits - before).square().mean()), report


@pytest.mark.parametrize("clip", [False, True])
def test_rounding_after_awq_is_better_than_rounding(tmp_path: Path, clip: bool) -> None:
    rounding = QuantizationModifier(**W4, weight_observer="minmax")
    alone, _ = chain_error(tmp_path / "alone", rounding)
    after, report = chain_error(tmp_path / "after", AWQModifier(clip=clip), rounding)
    assert after < 0.9 * alone
    assert not [note for note in report["notes"] if "AWQ" in note]


def test_clipping_is_left_out_before_gptq() -> None:
    weights = {}
    for name, clip, quantizer in (
        ("gptq", None, GPTQModifier(**W4)),
        ("gptq, not clipped", False, GPTQModifier(**W4)),
        ("rounded", None, QuantizationModifier(**W4)),
        ("rounded, not clipped", False, QuantizationModifier(**W4)),
    ):
        model = family_model("llama")
        oneshot(model, dataset=token_samples(), recipe=[AWQModifier(clip=clip, n_grid=2), quantizer])
        weights[name] = model.model.layers[0].mlp.down_proj.weight
    assert torch.equal(weights["gptq"], weights["gptq, not clipped"])
    assert not torch.equal(weights["rounded"], weights["rounded, not clipped"])


@pytest.mark.parametrize(
    ("factor", "reason"),
    [(1e38, "no finite calibration token reached its readers"), (1e25, "its inputs gave no finite factors")],
)
@pytest.mark.parametrize("kind", [AWQModifier, SmoothQuantModifier])
def test_values_beyond_float32_are_left_with_a_note(
    tmp_path: Path, factor: float, reason: str, kind: Callable[[], Any]
) -> None:
    """Their squares, or they themselves, are not finite: no weight may become NaN for it."""
    model = family_model("llama")
    model.model.layers[0].self_attn.v_proj.weight.data[5] *= factor
    rounding = QuantizationModifier(scheme="W8A8", targets=["re:.*o_proj"])
    oneshot(model, dataset=token_samples(), recipe=[kind(), rounding], output_dir=tmp_path / "out")
    report = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    notes = [note for note in report["notes"] if "layers.0.self_attn.v_proj is not scaled" in note]
    assert len(notes) == 1
    assert reason in notes[0]
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.parametrize("family", ["gemma2", "phi3", "qwen2"])
def test_families_come_through_the_whole_chain(tmp_path: Path, family: str) -> None:
    model = family_model(family)
    tokens = torch.tensor(token_samples(4, seed=8))
    before = model(tokens, use_cache=False).logits
    oneshot(model, dataset=token_samples(), recipe=[AWQModifier(n_grid=4), GPTQModifier(**(W4 | {"scheme": "W8A16"}))])
    change = (model(tokens, use_cache=False).logits - before).square().mean() / before.square().mean()
    assert change < 1e-3


def test_the_older_form_means_both() -> None:
    both = parse_recipe(AWQModifier(scheme="W4A16", targets=["Linear"], ignore=["lm_head"], n_grid=10))
    expected = QuantizationModifier(
        scheme="W4A16", targets=["Linear"], ignore=["lm_head"], weight_observer="hessian_signed"
    )
    assert both == [AWQModifier(n_grid=10), expected]
    assert parse_recipe(dump_recipe(both)) == both
    recipe = "a_stage:\n  a_modifiers:\n    AWQModifier: {scheme: W4A16, ignore: [lm_head], weight_observer: mse}\n"
    assert [type(modifier) for modifier in parse_recipe(recipe)] == [AWQModifier, QuantizationModifier]


def test_mappings_choose_among_what_can_be_scaled() -> None:
    model = family_model("llama")
    block = model.model.layers[0]
    query, gate = block.self_attn.q_proj.weight.clone(), block.mlp.gate_proj.weight.clone()
    mappings = [{"smooth_layer": "re:.*post_attention_layernorm", "balance_layers": ["re:.*gate_proj"]}]
    oneshot(model, dataset=token_samples(), recipe=[AWQModifier(mappings=mappings), QuantizationModifier(
        scheme="W8A16", group_size=32, targets=["re:.*mlp.*"])])  # fmt: skip
    assert torch.equal(query, block.self_attn.q_proj.weight)
    assert not torch.allclose(gate, block.mlp.gate_proj.weight, rtol=0.05)


def test_the_command_lines_names() -> None:
    chain = modifiers_of(CompressConfig("m", "out", algorithm="awq+gptq", group_size=64))
    assert [type(modifier) for modifier in chain] == [AWQModifier, GPTQModifier]
    first, second = modifiers_of(CompressConfig("m", "out", algorithm="awq"))
    assert isinstance(first, AWQModifier)
    assert isinstance(second, QuantizationModifier)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"duo_scaling": "some"}, "duo_scaling is 'some'"),
        ({"n_grid": 1}, "n_grid is 1"),
        ({"offload_device": "cpu"}, "offload_device is not there"),
        ({"group_size": 64}, "group_size goes with scheme"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AWQModifier(**arguments)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ([AWQModifier()], "but none follows it"),
        ([AWQModifier(), SmoothQuantModifier(), QuantizationModifier(**W4)], "scale the same channels"),  # type: ignore[arg-type]
        ([QuantizationModifier(**W4), AWQModifier()], "put AWQModifier before"),  # type: ignore[arg-type]
    ],
)
def test_senseless_chains_are_refused(chain: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        oneshot(family_model("llama"), dataset=token_samples(), recipe=chain)


@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "W3A16", "FP8_BLOCK", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16", "W4A8"])
def test_every_scheme_can_follow(scheme: str) -> None:
    model = family_model("llama")
    tokens = torch.tensor(token_samples(2, seed=8))
    before = model(tokens, use_cache=False).logits
    rounding = QuantizationModifier(scheme=scheme, ignore=["lm_head"])
    oneshot(model, dataset=token_samples(), recipe=[AWQModifier(n_grid=2, clip=True), rounding])
    change = (model(tokens, use_cache=False).logits - before).square().mean() / before.square().mean()
    assert 0 < change < 0.7
