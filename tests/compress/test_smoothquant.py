"""SmoothQuantModifier: what it changes, what it leaves, and that it helps where activations have outliers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_mappings import family_model
from tiny_models import token_samples

from octavo import oneshot
from octavo.compress.algorithms import algorithm_chain
from octavo.compress.command import modifiers_of
from octavo.compress.config import CompressConfig
from octavo.compress.modifiers.smoothquant import LogarithmicEqualizationModifier
from octavo.compress.recipe import dump_recipe, parse_recipe
from octavo.compress.simulation import rounded_activations
from octavo.errors import UserError
from octavo.modifiers import GPTQModifier, QuantizationModifier, SmoothQuantModifier

W8A8 = {"scheme": "W8A8", "ignore": ["lm_head"]}


def smoothed(model: Any, modifier: SmoothQuantModifier, *after: Any) -> Any:
    return oneshot(model, dataset=token_samples(), recipe=[modifier, *after])


def logits(model: Any) -> torch.Tensor:
    return model(torch.tensor(token_samples(2, seed=9)), use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "olmo2", "phi3", "mixtral"])
@pytest.mark.parametrize("arguments", [{"smoothing_strength": 0.8}, {"algorithm": "log_equalization"}])
def test_alone_it_changes_weights_and_no_logit(family: str, arguments: dict[str, Any]) -> None:
    model = family_model(family)
    before, value = logits(model), model.model.layers[0].self_attn.o_proj.weight.clone()
    smoothed(model, SmoothQuantModifier(**arguments))
    assert not torch.equal(value, model.model.layers[0].self_attn.o_proj.weight)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def test_factors_are_those_of_the_range_of_the_inputs() -> None:
    model = family_model("llama")
    block = model.model.layers[0]
    seen = []
    handle = block.mlp.gate_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    model(torch.tensor(token_samples()), use_cache=False)
    handle.remove()
    spread = seen[0].amax(dim=0) - seen[0].amin(dim=0)
    gate, up = block.mlp.gate_proj.weight.clone(), block.mlp.up_proj.weight.clone()
    expected = spread.sqrt() / (2 * torch.maximum(gate.abs(), up.abs()).amax(dim=0)).sqrt()
    smoothed(
        model, SmoothQuantModifier(smoothing_strength=0.5, mappings=[[["re:.*gate_proj"], "re:.*post_attention.*"]])
    )
    torch.testing.assert_close(block.mlp.gate_proj.weight, gate * expected, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(block.mlp.up_proj.weight / up, block.mlp.gate_proj.weight / gate, rtol=1e-4, atol=1e-4)


def with_outliers() -> Any:
    """A model whose norms make some channels thirty times as large, and whose weights read little of them."""
    model = family_model("llama")
    block = model.model.layers[0]
    for norm, readers in (
        (block.input_layernorm, (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)),
        (block.post_attention_layernorm, (block.mlp.gate_proj, block.mlp.up_proj)),
    ):
        norm.weight.data[::16] *= 30
        for reader in readers:
            reader.weight.data[:, ::16] /= 30
    return model


def error_with_rounded_activations(model: Any, target: torch.Tensor) -> float:
    hooks = [
        module.register_forward_pre_hook(lambda module, args: (rounded_activations(args[0], scheme),))
        for module in model.model.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    error = float((logits(model) - target).square().mean())
    for hook in hooks:
        hook.remove()
    return error


scheme = QuantizationModifier(**W8A8)._groups[0].scheme.activations  # type: ignore[arg-type]


def test_outliers_move_into_weights() -> None:
    errors = {}
    for name, steps in {
        "none": [],
        "half": [SmoothQuantModifier(smoothing_strength=0.5)],
        "auto": [SmoothQuantModifier()],
    }.items():
        model = with_outliers()
        target = logits(model)
        oneshot(model, dataset=token_samples(), recipe=[*steps, QuantizationModifier(**W8A8)])
        errors[name] = error_with_rounded_activations(model, target)
    assert errors["half"] < 0.5 * errors["none"]
    assert errors["auto"] < 0.5 * errors["none"]


def test_factors_that_make_the_block_worse_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = torch.ones(64)
    bad[::2] = 1e3  # columns of a weight so different that the smaller ones are rounded to nothing
    monkeypatch.setattr("octavo.compress.modifiers.smoothquant._best_factors", lambda *given: bad)
    model = family_model("llama")
    norm = model.model.layers[0].input_layernorm.weight.clone()
    smoothed(model, SmoothQuantModifier(mappings=[[["re:.*q_proj"], "re:.*input_layernorm"]]), GPTQModifier(**W8A8))
    assert torch.equal(norm, model.model.layers[0].input_layernorm.weight)


def test_ignored_layers_keep_their_weights() -> None:
    model = family_model("llama")
    block = model.model.layers[0]
    gate, query = block.mlp.gate_proj.weight.clone(), block.self_attn.q_proj.weight.clone()
    smoothed(model, SmoothQuantModifier(smoothing_strength=0.5, ignore=["re:.*self_attn.*"]))
    assert torch.equal(query, block.self_attn.q_proj.weight)
    assert not torch.equal(gate, block.mlp.gate_proj.weight)


def test_layers_that_no_quantizer_wants_stay() -> None:
    model = family_model("llama")
    query = model.model.layers[0].self_attn.q_proj.weight.clone()
    smoothed(model, SmoothQuantModifier(), GPTQModifier(scheme="W8A8", targets=["re:.*mlp.*"]))
    assert torch.equal(query, model.model.layers[0].self_attn.q_proj.weight)


def test_recipes_in_the_peers_form() -> None:
    recipe = """
quant_stage:
  quant_modifiers:
    SmoothQuantModifier:
      smoothing_strength: 0.8
      mappings: [[["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"]]
    GPTQModifier: {scheme: W8A8, ignore: [lm_head]}
"""
    first, second = parse_recipe(recipe)
    assert isinstance(first, SmoothQuantModifier)
    assert isinstance(second, GPTQModifier)
    assert parse_recipe(dump_recipe([first, second])) == [first, second]  # type: ignore[arg-type]
    assert LogarithmicEqualizationModifier().algorithm == "log_equalization"
    assert algorithm_chain("smoothquant+gptq") == ["smoothquant", "gptq"]
    chain = modifiers_of(CompressConfig("m", "out", scheme="W8A8", algorithm="smoothquant+gptq"))
    assert chain == [SmoothQuantModifier(), GPTQModifier(**W8A8)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"smoothing_strength": 1.5}, "smoothing_strength is 1.5"),
        ({"smoothing_strength": "much"}, "smoothing_strength is 'much'"),
        ({"algorithm": "magic"}, "algorithm is 'magic'"),
        ({"num_calibration_steps": 4}, "num_calibration_samples"),
        ({"mappings": ["q_proj"]}, "mappings: 'q_proj' is not understood"),
        ({"mappings": [{"smooth_layer": "a"}]}, "is not understood"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SmoothQuantModifier(**arguments)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(UserError, match="no layers that can share factors as mappings names them"):
        smoothed(family_model("llama"), SmoothQuantModifier(mappings=[[["re:.*w1"], "re:.*ffn_norm"]]))
