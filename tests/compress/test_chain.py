"""Transforms, pruners and quantizers in one recipe: who is called when, with what, and what is written and resumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model, token_samples
from torch import nn

from octavo.compress.blocks import Blocks, siblings
from octavo.compress.modifiers.base import LinearLayer, Modifier, PrunedLayer, Pruner, Transform
from octavo.compress.oneshot import oneshot
from octavo.compress.statistics import InputStatistics
from octavo.compress.work_folder import WorkFolder
from octavo.modifiers import GPTQModifier

GPTQ = {"scheme": "W4A16", "group_size": 32, "ignore": ["lm_head"]}


@dataclass(kw_only=True)
class DoubleNorm(Transform):
    """Doubles the input norm and halves what reads it, when it has seen what that reads."""

    calibrated = True
    factor: float = 2.0
    tokens: list[int] = field(default_factory=list)

    def unused_patterns(self, modules: dict[str, nn.Module]) -> list[str]:
        return []

    def prepare(self, model: Any, blocks: Blocks) -> list[str]:
        return ["norms are doubled"]

    def watch(self, index: int) -> dict[str, frozenset[str]]:
        return {f"model.layers.{index}.self_attn.q_proj": frozenset({"absmean"})}

    def apply(self, index: int, block: nn.Module, inputs: dict[str, InputStatistics]) -> list[str]:
        self.tokens.append(inputs[f"model.layers.{index}.self_attn.q_proj"].tokens)
        block.input_layernorm.weight.mul_(self.factor)
        for layer in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
            layer.weight.div_(self.factor)
        return [f"block {index} doubled"]

    def to_recipe(self) -> dict[str, Any]:
        return {"factor": self.factor}


@dataclass(kw_only=True)
class EvenColumns(Pruner):
    """Keeps every other column of the MLP."""

    @property
    def statistics(self) -> frozenset[str]:
        return frozenset({"diagonal"})

    def unused_patterns(self, modules: dict[str, nn.Module]) -> list[str]:
        return []

    def claim(self, name: str, module: nn.Module) -> bool:
        return ".mlp." in name

    def prune(self, layers: list[LinearLayer], inputs: InputStatistics | None) -> list[PrunedLayer]:
        assert inputs is not None
        assert (inputs.diagonal() > 0).all()
        results = []
        for layer in layers:
            mask = torch.zeros_like(layer.weight, dtype=torch.bool)
            mask[:, 1::2] = True
            results.append(PrunedLayer(layer.name, layer.weight.masked_fill(mask, 0.0), mask, 0.5))
        return results


def test_names_tell_who_reads_the_same_input() -> None:
    names = [f"m.0.self_attn.{n}_proj" for n in "qkvo"] + [f"m.0.mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert siblings([*names, "m.1.mlp.up_proj"]) == [names[:3], [names[3]], names[4:6], [names[6]], ["m.1.mlp.up_proj"]]


def compress(recipe: list[Modifier], output_dir: Path, **arguments: Any) -> Any:
    model = tiny_model("llama", num_hidden_layers=3)
    return oneshot(model, dataset=token_samples(), recipe=recipe, output_dir=output_dir, **arguments)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_transform_sees_inputs_and_changes_the_block(batch_size: int | None, tmp_path: Path) -> None:
    transform = DoubleNorm()
    original = tiny_model("llama", num_hidden_layers=3)
    compress([transform], tmp_path, batch_size=batch_size)
    assert transform.tokens == [6 * 24] * 3
    stored = load_file(tmp_path / "model.safetensors")
    for name, before in original.state_dict().items():
        factor = (
            2.0 if "input_layernorm" in name else 0.5 if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else 1
        )
        torch.testing.assert_close(stored[name], before * factor)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    report = (tmp_path / "compression_report.json").read_text()
    assert "norms are doubled" in report
    assert "block 2 doubled" in report


def test_pruned_layers_that_nothing_quantizes_are_stored_dense(tmp_path: Path) -> None:
    compress([EvenColumns()], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name, value in stored.items():
        pruned = ".mlp." in name
        assert bool((value[..., 1::2] == 0).all()) == pruned, name


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_resumed_chain_writes_the_same_files(
    batch_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain: list[Modifier] = [DoubleNorm(), EvenColumns(), GPTQModifier(**GPTQ, targets=["re:.*self_attn"])]
    compress(chain, tmp_path / "whole", batch_size=batch_size)
    save = WorkFolder.save

    def interrupted(self: WorkFolder, index: int, *rest: Any) -> None:
        if index == 2:
            raise KeyboardInterrupt
        save(self, index, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compress(chain, tmp_path / "broken", batch_size=batch_size)
    compress(chain, tmp_path / "broken", batch_size=batch_size, resume=True)
    for name in ("model.safetensors", "config.json", "recipe.yaml"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes(), name
