"""Shards and conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoint.convert import convert
from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.scheme import WeightScheme
from octavo.checkpoint.shards import ShardWriter, write_json
from octavo.checkpoint.writer import CompressedGroup, compressed_parameters, compressed_tensors_config
from octavo.errors import CheckpointError, UserError

TENSORS = {f"t{i}": torch.randn(16, 16) for i in range(6)}  # a KiB each


def fill(writer: ShardWriter, names: list[str]) -> None:
    for name in names:
        writer.add(name, TENSORS[name])


def test_one_shard_is_a_single_file(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    fill(writer, list(TENSORS))
    assert [path.name for path in writer.close()] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_shards_and_their_index(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, max_shard_bytes=2500)
    fill(writer, list(TENSORS))
    files = writer.close()
    assert [path.name for path in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * 1024
    assert set(index["weight_map"]) == set(TENSORS)
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])
    assert {path.name for path in tmp_path.iterdir()} == {*(p.name for p in files), "model.safetensors.index.json"}


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, max_shard_bytes=10)
    fill(writer, ["t0", "t1"])
    assert len(writer.close()) == 2


def test_complete_shards_are_gone_on_from(tmp_path: Path) -> None:
    first = ShardWriter(tmp_path, max_shard_bytes=2500)
    fill(first, ["t0", "t1", "t2"])  # t2 is still in memory when the process dies
    assert first.written == {"t0", "t1"}
    second = ShardWriter(tmp_path, max_shard_bytes=2500, resume=True)
    assert second.written == {"t0", "t1"}
    with pytest.raises(CheckpointError, match="twice"):
        second.add("t1", TENSORS["t1"])
    fill(second, ["t2", "t3", "t4", "t5"])
    files = second.close()
    assert {name for file in files for name in load_file(file)} == set(TENSORS)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * 1024


def test_a_broken_shard_is_made_again(tmp_path: Path) -> None:
    first = ShardWriter(tmp_path, max_shard_bytes=2500)
    fill(first, ["t0", "t1", "t2", "t3", "t4"])
    shard = tmp_path / "model-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    assert ShardWriter(tmp_path, max_shard_bytes=2500, resume=True).written == {"t0", "t1"}
    assert not shard.exists()


def test_without_resume_old_shards_go(tmp_path: Path) -> None:
    first = ShardWriter(tmp_path, max_shard_bytes=10)
    fill(first, ["t0", "t1", "t2"])
    second = ShardWriter(tmp_path)
    assert second.written == set()
    fill(second, ["t3"])
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_earlier_checkpoint_in_the_directory_is_replaced(tmp_path: Path) -> None:
    first = ShardWriter(tmp_path, max_shard_bytes=10)
    fill(first, ["t0", "t1", "t2"])
    first.close()
    second = ShardWriter(tmp_path)
    fill(second, ["t3"])
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_views_are_stored_without_what_they_look_into(tmp_path: Path) -> None:
    big = torch.randn(1000, 1000)
    writer = ShardWriter(tmp_path)
    writer.add("row", big[3])
    writer.add("turned", big[:4, :2].T)
    big.zero_()
    (file,) = writer.close()
    assert file.stat().st_size < 10_000
    assert float(load_file(file)["row"].abs().sum()) > 0
    assert load_file(file)["turned"].shape == (2, 4)


def test_nothing_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor"):
        ShardWriter(tmp_path).close()
    with pytest.raises(CheckpointError, match="positive"):
        ShardWriter(tmp_path, max_shard_bytes=0)


def test_json_is_sorted_and_indented(tmp_path: Path) -> None:
    write_json(tmp_path / "c.json", {"b": 1, "a": {"ü": None}})
    assert (tmp_path / "c.json").read_text(encoding="utf-8") == '{\n  "a": {\n    "ü": null\n  },\n  "b": 1\n}\n'


# ------------------------------------------------------------------ conversion


@pytest.fixture(scope="module")
def converted_demo(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(demo_path, tmp_path_factory.mktemp("demo") / "out")


def test_the_demo_becomes_plain_safetensors(demo_path: Path, converted_demo: Path) -> None:
    from transformers import AutoTokenizer

    directory = converted_demo
    source, result = open_checkpoint(demo_path), open_checkpoint(directory)
    assert set(result.names()) == set(source.names())
    for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight", "model.norm.weight"):
        assert result.tensor(name).dtype == torch.bfloat16
        assert torch.equal(result.tensor(name), source.tensor(name).to(torch.bfloat16))
    assert result.generation_config == source.generation_config
    tokenizer, original = AutoTokenizer.from_pretrained(directory), source.load_tokenizer()
    text = "Hello 123, <|im_start|>naïve 日本\n"
    assert tokenizer(text)["input_ids"] == original(text)["input_ids"]
    assert tokenizer.chat_template == original.chat_template
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"  # which older transformers know as well
    assert config["chat_template"] == original.chat_template


@pytest.mark.slow
def test_transformers_generates_from_the_converted_demo(converted_demo: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted_demo)
    model = AutoModelForCausalLM.from_pretrained(converted_demo)
    assert model.dtype == torch.bfloat16
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def test_a_plain_checkpoint_keeps_its_tokenizer_files(tiny_llama: Path, tmp_path: Path) -> None:
    directory = convert(tiny_llama, tmp_path / "out", dtype="float16", max_shard_bytes=60_000)
    assert (directory / "model.safetensors.index.json").is_file()
    for file in tiny_llama.glob("*token*"):
        assert (directory / file.name).read_bytes() == file.read_bytes()
    source, result = open_checkpoint(tiny_llama), open_checkpoint(directory)
    assert all(torch.equal(result.tensor(n), source.tensor(n).half()) for n in source.names())
    assert result.config["torch_dtype"] == "float16"
    assert "dtype" not in result.config


def test_a_compressed_checkpoint_becomes_plain(tiny_llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_llama, tmp_path / "q"))
    tensors = load_file(source / "model.safetensors")
    scheme, module = WeightScheme(8, strategy="channel"), "model.layers.0.mlp.up_proj"
    shape = tensors.pop(f"{module}.weight").shape
    codes, scale = torch.randint(-128, 128, shape, dtype=torch.int8), torch.rand(shape[0], 1)
    save_file(tensors | compressed_parameters(module, codes, scale, scheme), source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    write_json(
        source / "config.json", config | {"quantization_config": compressed_tensors_config([CompressedGroup(scheme)])}
    )
    result = open_checkpoint(convert(source, tmp_path / "out", dtype="float32"))
    assert "quantization_config" not in result.config
    expected = codes.float() * scale.to(torch.bfloat16).float()
    assert torch.equal(result.tensor(f"{module}.weight"), expected)


def test_what_cannot_be_converted(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"int4.*bfloat16"):
        convert(tiny_llama, tmp_path / "out", dtype="int4")
    with pytest.raises(UserError, match="is the model itself"):
        convert(tiny_llama, tiny_llama)
    source = Path(shutil.copytree(tiny_llama, tmp_path / "huge"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*float16"):
        convert(source, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out" / "config.json").exists()
