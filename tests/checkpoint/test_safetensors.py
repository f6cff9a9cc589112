"""Directories of safetensors, whole and broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.safetensors_checkpoint import INDEX, SINGLE
from octavo.errors import CheckpointError, UnsupportedModelError


@pytest.fixture
def plain(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "plain"))


@pytest.fixture
def sharded(plain: Path) -> Path:
    """The same in three shards with an index."""
    tensors = load_file(plain / SINGLE)
    names = sorted(tensors)
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, plain / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[number::3], file)
    (plain / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (plain / SINGLE).unlink()
    return plain


def test_a_single_file(plain: Path) -> None:
    stored = load_file(plain / SINGLE)
    checkpoint = open_checkpoint(plain)
    assert set(checkpoint.names()) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(checkpoint.tensor(name, tuple(tensor.shape)), tensor)
    assert torch.equal(checkpoint.weight("lm_head"), stored["lm_head.weight"])
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config["eos_token_id"] == 0


def test_shards(sharded: Path, tiny_llama: Path) -> None:
    stored = load_file(tiny_llama / SINGLE)
    checkpoint = open_checkpoint(sharded)
    assert set(checkpoint.names()) == set(stored)
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in stored.items())


def test_shards_without_an_index(sharded: Path, tiny_llama: Path) -> None:
    (sharded / INDEX).unlink()
    assert set(open_checkpoint(sharded).names()) == set(load_file(tiny_llama / SINGLE))


def test_the_tokenizer(plain: Path) -> None:
    tokenizer = open_checkpoint(plain).load_tokenizer()
    assert tokenizer.decode(tokenizer("hello")["input_ids"]) == "hello"
    assert tokenizer.chat_template


def test_a_missing_tokenizer_names_what_is_missing_and_the_way_out(plain: Path) -> None:
    for file in plain.glob("token*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*--tokenizer"):
        open_checkpoint(plain).load_tokenizer()
    (plain / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot be loaded.*--tokenizer"):
        open_checkpoint(plain).load_tokenizer()


def test_a_missing_tensor_and_a_wrong_shape(plain: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(plain / SINGLE)
    shape = list(tensors[name].shape)
    checkpoint = open_checkpoint(plain)
    with pytest.raises(CheckpointError, match=rf"{name}.*\[{shape[0]}, {shape[1]}\].*\[1, 2\]"):
        checkpoint.tensor(name, (1, 2))
    del tensors[name]
    save_file(tensors, plain / SINGLE)
    checkpoint = open_checkpoint(plain)
    assert name not in checkpoint
    with pytest.raises(CheckpointError, match=rf"{name}.*missing.*mlp\.up_proj\.weight"):
        checkpoint.weight("model.layers.1.mlp.up_proj")


@pytest.mark.parametrize("length", [0, 5, 8, 100, 1200, -1, -100])
def test_a_truncated_file(plain: Path, length: int) -> None:
    whole = (plain / SINGLE).read_bytes()
    (plain / SINGLE).write_bytes(whole[:length])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(plain)


def test_a_truncated_file_names_the_tensor_and_the_sizes(plain: Path) -> None:
    whole = (plain / SINGLE).read_bytes()
    (plain / SINGLE).write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=rf"{len(whole) - 100} of {len(whole)} bytes, and tensor 'm.*\[.*\]"):
        open_checkpoint(plain)


def test_a_missing_shard_and_a_shard_without_its_tensor(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, shard)
    with pytest.raises(CheckpointError, match=rf"00002-of-00003.*{lost}.*missing"):
        open_checkpoint(sharded)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"shard model-00002-of-00003.safetensors is missing"):
        open_checkpoint(sharded)


def test_an_index_cannot_point_elsewhere(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_checkpoint(sharded)
    (sharded / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        open_checkpoint(sharded)


def test_a_tokenizer_with_code_of_its_own_is_not_run(plain: Path) -> None:
    config = json.loads((plain / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (plain / "tokenizer_config.json").write_text(json.dumps(config | own))
    (plain / "own.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(CheckpointError, match="--tokenizer"):
        open_checkpoint(plain).load_tokenizer()


def test_pickles_are_never_opened(plain: Path) -> None:
    (plain / SINGLE).unlink()
    (plain / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*never opened.*safetensors"):
        open_checkpoint(plain)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*never opened.*safetensors"):
        open_checkpoint(plain / "pytorch_model.bin")


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_a_broken_config(plain: Path, content: str) -> None:
    (plain / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(plain)
    (plain / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(plain)


def test_a_directory_without_weights(plain: Path) -> None:
    (plain / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        open_checkpoint(plain)
    (plain / "model.Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.Q8_0\.gguf"):
        open_checkpoint(plain)


def test_other_quantization_methods_are_refused_by_name(plain: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(UnsupportedModelError, match="bitsandbytes"):
        open_checkpoint(plain)
