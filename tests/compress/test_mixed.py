"""Bits by layer: sensitivities against the loss itself, allocation against brute force, sizes and limits kept."""

from __future__ import annotations

import itertools
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import token_samples
from torch import nn

from octavo.builtin_text import builtin_text
from octavo.checkpoint.reader import open_checkpoint
from octavo.compress import run
from octavo.compress.assignment import make_plan
from octavo.compress.bit_allocation import Target, allocate, least_budget, parse_target, predicted_loss, total_size
from octavo.compress.blocks import find_blocks
from octavo.compress.checkpoint_source import CheckpointSource
from octavo.compress.config import CompressConfig
from octavo.compress.loaded_source import LoadedSource
from octavo.compress.observers import choose_grid
from octavo.compress.rounding import dequantize, quantize
from octavo.compress.sensitivity import Unit, mean_loss, measure
from octavo.errors import UserError
from octavo.models import load_model
from octavo.modifiers import QuantizationModifier

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from harness import Driver


def trained(model: Any, ids: torch.Tensor, steps: int = 60) -> Any:
    """The model after it has learned some sequences: at a minimum of the loss, curvature is what is left."""
    model.train().requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_loss_is_that_of_the_model(family: str) -> None:
    from tiny_models import tiny_model

    model = tiny_model(family)
    ids = torch.tensor(token_samples(3, 24))
    expected = float(model(ids, labels=ids).loss.detach())
    source = LoadedSource(model, None)
    assert mean_loss(source, find_blocks(model), list(ids.split(2))) == pytest.approx(expected, rel=1e-4)


def test_predicted_losses_are_near_the_measured_ones() -> None:
    from tiny_models import tiny_model

    torch.manual_seed(0)
    ids = torch.tensor(token_samples(24, 24))
    model = trained(tiny_model("llama", initializer_range=0.05), ids)
    source = LoadedSource(model, None)
    blocks = find_blocks(model)
    plan = make_plan(model, blocks, [QuantizationModifier(scheme="W4A16", group_size=32, ignore=["lm_head"])])
    units = measure(source, blocks, plan, ids.split(1), (2, 3, 4))
    assert [unit.names[0].rpartition(".")[2] for unit in units] == 2 * ["q_proj", "o_proj", "gate_proj", "down_proj"]
    before = mean_loss(source, blocks, [ids])
    predicted, found = [], []
    for unit, width in itertools.product(units, (3, 4)):
        kept = {name: model.get_submodule(name).weight.clone() for name in unit.names}
        for name in unit.names:
            layer: Any = model.get_submodule(name)
            scheme = replace(plan.layers[name].scheme, num_bits=width)  # type: ignore[type-var]
            grid = choose_grid(layer.weight.float(), None, scheme, "signed", torch.float32)
            layer.weight.copy_(dequantize(quantize(layer.weight, grid, scheme), grid, scheme))
        found.append(mean_loss(source, blocks, [ids]) - before)
        predicted.append(unit.loss[width])
        for name, weight in kept.items():
            model.get_submodule(name).weight.copy_(weight)
    correlation = torch.corrcoef(torch.tensor([predicted, found]).clamp_min(1e-9).log())[0, 1]
    assert correlation > 0.8
    ratio = sum(predicted) / sum(found)
    assert 0.2 < ratio < 5


def test_an_error_that_all_tokens_share_is_not_averaged_away() -> None:
    """Inputs with much in common make of a rounding error the same shift of every token's values, which attention
    passes on as it is. Counted a token at a time, as if they were independent, it looks a tenth as large."""
    from tiny_models import tiny_model

    torch.manual_seed(0)
    ids = torch.tensor(token_samples(24, 64))
    model = tiny_model("llama", initializer_range=0.1).requires_grad_(False)
    embedding: Any = model.get_input_embeddings()
    embedding.weight += 0.3 * torch.randn(model.config.hidden_size)
    blocks = find_blocks(model)
    plan = make_plan(model, blocks, [QuantizationModifier(scheme="W3A16", group_size=32, ignore=["lm_head"])])
    units = measure(LoadedSource(model, None), blocks, plan, ids.split(1), (3,))
    before = model(ids).logits.log_softmax(-1)
    for unit in units:
        if not unit.names[0].endswith("q_proj"):
            continue
        kept = {name: model.get_submodule(name).weight.clone() for name in unit.names}
        for name, weight in kept.items():
            scheme = plan.layers[name].scheme
            assert scheme is not None
            grid = choose_grid(weight, None, scheme, "signed", torch.float32)
            model.get_submodule(name).weight.copy_(dequantize(quantize(weight, grid, scheme), grid, scheme))
        found = (before.exp() * (before - model(ids).logits.log_softmax(-1))).sum(dim=-1).mean()
        assert unit.loss[3] == pytest.approx(float(found), rel=0.4)
        for name, weight in kept.items():
            model.get_submodule(name).weight.copy_(weight)


def random_units(count: int, seed: int) -> list[Unit]:
    chance = random.Random(seed)
    units = []
    for number in range(count):
        scale, weights = chance.random() ** 3, chance.randint(1, 4) * 100
        loss = {None: 0.0} | {bits: scale * 4.0**-bits * chance.uniform(0.7, 1.3) for bits in (3, 4, 8)}
        size = {None: 16 * weights} | {bits: bits * weights for bits in (3, 4, 8)}
        units.append(Unit((f"layer{number}",), loss, size))
    return units


@pytest.mark.parametrize("seed", range(5))
def test_the_allocation_is_as_good_as_any_of_its_size(seed: int) -> None:
    units = random_units(5, seed)
    least, most = (sum(pick(unit.size.values()) for unit in units) for pick in (min, max))
    for budget in range(least, most, (most - least) // 7):
        widths = allocate(units, budget)
        used = total_size(units, widths)
        assert used <= budget
        best = min(
            predicted_loss(units, list(choice))
            for choice in itertools.product((3, 4, 8, None), repeat=5)
            if total_size(units, list(choice)) <= used
        )
        # The last steps fill what is left and need not be the best for their bytes.
        assert predicted_loss(units, widths) <= 1.3 * best + 1e-12
    assert allocate(units, most) == [None] * 5
    limit = predicted_loss(units, allocate(units, (least + most) // 2))
    assert predicted_loss(units, allocate(units, least_budget(units, limit))) <= limit
    with pytest.raises(UserError, match="at their narrowest they take"):
        allocate(units, least - 1)


@pytest.mark.parametrize(
    ("text", "target"),
    [("90MB", Target(num_bytes=90_000_000)), ("1.5 GiB", Target(num_bytes=1_610_612_736)), ("40%", Target(share=0.4)),
     ("4.25bits", Target(bits=4.25)), ("5000", Target(num_bytes=5000))],
)  # fmt: skip
def test_sizes_are_read(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize("text", ["", "big", "0MB", "-3MB", "140%", "3 apples"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="give bytes"):
        parse_target(text)


def config_for(model: Path, out: Path, **settings: Any) -> CompressConfig:
    text = out.parent / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog; 0123456789 times.\n" * 40)
    defaults = {"group_size": 32, "calibration_file": str(text), "num_calibration_samples": 8, "max_seq_length": 64}
    return CompressConfig(str(model), str(out), **(defaults | settings))


def test_a_target_size_is_kept(tiny_llama: Path, tmp_path: Path) -> None:
    plain = run(config_for(tiny_llama, tmp_path / "plain", scheme="W4A16"), quiet=True)
    target = plain.report["size"]["after_bytes"] + 12_000
    run(config_for(tiny_llama, tmp_path / "out", target_size=str(target)), quiet=True)
    report = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0.8 * target < size <= target
    bits = {layer["name"]: layer["num_bits"] for layer in report["layers"]}
    assert len(set(bits.values())) > 1
    for index in range(2):
        attention = f"model.layers.{index}.self_attn"
        assert len({bits.get(f"{attention}.{name}_proj") for name in "qkv"}) == 1
    assert sum(report["mixed_precision"]["layers_by_width"].values()) == 14
    from octavo.compress.recipe import parse_recipe

    parse_recipe(tmp_path / "out" / "recipe.yaml")
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert isinstance(loaded, nn.Module)


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_widths_without_a_kernel_are_served_and_read_by_transformers(
    bits: int, tiny_llama: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    run(config_for(tiny_llama, tmp_path / "out", target_size=f"{bits + 1.2}bits", bit_choices=(bits,)), quiet=True)
    report = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    assert f"{bits} bits" in report["mixed_precision"]["layers_by_width"]
    ids = token_samples(1, 24)[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = loaded(torch.tensor([ids])).logits[0]
    driver = Driver(load_model(open_checkpoint(tmp_path / "out"), dtype=torch.float32), num_blocks=4)
    sequence = driver.add(ids)
    driver.step([(sequence, len(ids))])
    found = torch.stack([sequence.logits[position] for position in range(len(ids))])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_target_that_cannot_be_kept_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at their narrowest they take"):
        run(config_for(tiny_llama, tmp_path / "out", target_size="10%"), quiet=True)
    with pytest.raises(UserError, match="integer weights alone"):
        run(config_for(tiny_llama, tmp_path / "out", target_size="60%", scheme="W8A8", group_size=None), quiet=True)
    with pytest.raises(UserError, match="not both"):
        config_for(tiny_llama, tmp_path / "out", target_size="60%", max_perplexity_increase=1.0).check()


def test_a_limit_on_perplexity_is_kept_and_the_search_can_be_resumed(tiny_llama: Path, tmp_path: Path) -> None:
    settings = {"max_perplexity_increase": 5.0, "bit_choices": (2, 3, 4, 8)}
    report = run(config_for(tiny_llama, tmp_path / "out", **settings), quiet=True).report
    mixed = report["mixed_precision"]
    chosen = min((t for t in mixed["trials"] if t["perplexity"] <= 1.05 * mixed["perplexity_before"] * 1.0001),
                 key=lambda trial: trial["bytes"])  # fmt: skip
    assert report["size"]["after_bytes"] == chosen["bytes"]
    assert "sequences of" in mixed["held_out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == []
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    again = run(config_for(tiny_llama, tmp_path / "out", resume=True, **settings), quiet=True)
    assert again.report == json.loads(before["compression_report.json"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_model_is_better_than_with_four_bits_everywhere(demo_path: Path, tmp_path: Path) -> None:
    """At the same bytes, on text that neither was calibrated on; with 16 windows nothing shows."""
    text = builtin_text("calibration")
    calibration = tmp_path / "calibration.txt"
    calibration.write_text(text[: len(text) // 2])
    settings = {"calibration_file": str(calibration), "num_calibration_samples": 32, "max_seq_length": 512,
                "group_size": 64, "device": "cpu"}  # fmt: skip
    run(CompressConfig(str(demo_path), str(tmp_path / "uniform"), **settings), quiet=True)
    size = (tmp_path / "uniform" / "model.safetensors").stat().st_size
    run(CompressConfig(str(demo_path), str(tmp_path / "mixed"), target_size=str(size), **settings), quiet=True)
    assert (tmp_path / "mixed" / "model.safetensors").stat().st_size <= size
    losses = {}
    for name in ("uniform", "mixed"):
        source = CheckpointSource(open_checkpoint(tmp_path / name), name)
        ids = source.tokenizer(text[len(text) // 2 :])["input_ids"][: 60 * 512]
        losses[name] = mean_loss(source, find_blocks(source.model), list(torch.tensor(ids).reshape(60, 512).split(1)))
    assert losses["mixed"] < losses["uniform"]
