"""Random weights from a config alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.reader import DummyCheckpoint, open_checkpoint
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.checkpoint.writer import CompressedGroup, compressed_tensors_config
from octavo.errors import CheckpointError, UserError


def config_only(source: Path, directory: Path, **changes: Any) -> Path:
    directory.mkdir()
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def test_names_and_shapes_are_the_architectures(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(config_only(tiny_llama, tmp_path / "d"), load_format="dummy")
    stored = load_file(tiny_llama / "model.safetensors")
    assert set(checkpoint.names()) == set(stored)
    for name, tensor in stored.items():
        assert name in checkpoint
        assert checkpoint.tensor(name).shape == tensor.shape
    assert "model.layers.0.self_attn.q_proj.bias" not in checkpoint
    with pytest.raises(CheckpointError, match="nothing"):
        checkpoint.tensor("model.nothing.weight")


def test_weights_are_spread_and_repeatable(tiny_llama: Path, tmp_path: Path) -> None:
    path = config_only(tiny_llama, tmp_path / "d", dtype="float32")
    first, same, other = (DummyCheckpoint(path, seed) for seed in (0, 0, 1))
    name = "model.embed_tokens.weight"
    shape = (3000, 700)  # larger than the tile that is repeated
    weight = first.tensor(name, shape)
    assert weight.dtype == torch.float32
    assert 0.019 < float(weight.std()) < 0.021
    assert torch.equal(weight, same.tensor(name, shape))
    assert not torch.equal(weight, other.tensor(name, shape))
    assert not torch.equal(weight, first.tensor("model.other.weight", shape))
    assert torch.equal(first.tensor("model.norm.weight"), torch.ones(64))
    assert torch.equal(first.tensor("x.bias", (5,)), torch.zeros(5))


SCHEMES = [
    WeightScheme(4, group_size=32),
    WeightScheme(4, symmetric=False, group_size=16),
    WeightScheme(8, strategy="channel", activations=ActivationScheme()),
    WeightScheme(8, symmetric=False, strategy="channel"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantized_as_the_config_says(scheme: WeightScheme, tiny_llama: Path, tmp_path: Path) -> None:
    content = compressed_tensors_config([CompressedGroup(scheme)], ignore=["lm_head", "re:.*up_proj"])
    checkpoint = open_checkpoint(
        config_only(tiny_llama, tmp_path / "d", quantization_config=content), load_format="dummy"
    )
    weight = checkpoint.weight("model.layers.1.mlp.down_proj", (256, 512))
    assert isinstance(weight, QuantizedWeight)
    assert weight.scheme == scheme
    assert 0.02 < float(weight.dequantize().std()) < 0.05
    assert abs(float(weight.dequantize().mean())) < 0.01
    for dense in ("lm_head", "model.layers.1.mlp.up_proj", "model.embed_tokens"):
        assert isinstance(checkpoint.weight(dense), torch.Tensor)
    assert isinstance(checkpoint.weight("model.layers.1.mlp.down_proj"), QuantizedWeight)


def test_other_families_and_ggufs(demo_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt_neox", "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 1})
    )
    assert "gpt_neox.layers.0.attention.query_key_value.weight" in DummyCheckpoint(tmp_path)
    demo = DummyCheckpoint(demo_path)
    assert demo.tensor("model.layers.0.mlp.up_proj.weight").shape == (1536, 576)
    assert "lm_head.weight" not in demo


def test_the_tokenizer_is_still_the_directorys(tiny_llama: Path, tmp_path: Path) -> None:
    assert DummyCheckpoint(tiny_llama).load_tokenizer().chat_template
    with pytest.raises(CheckpointError, match="--tokenizer"):
        DummyCheckpoint(config_only(tiny_llama, tmp_path / "d")).load_tokenizer()


def test_an_unknown_format_or_architecture(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="load_format is 'pickle'"):
        open_checkpoint(tiny_llama, load_format="pickle")
    path = config_only(tiny_llama, tmp_path / "d", model_type="no-such-model")
    with pytest.raises(CheckpointError, match="transformers cannot build"):
        DummyCheckpoint(path).names()
    shutil.rmtree(path)
    with pytest.raises(UserError):
        open_checkpoint(path, load_format="dummy")
