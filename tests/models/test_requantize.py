"""`requantize`: what no kernel reads as it is stored becomes 4 bits in memory, what has a kernel stays as it is."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from harness import load, save_random
from test_gguf_models import metadata
from test_quantized import run
from transformers import LlamaConfig, Qwen2Config

from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.writer import ShardWriter
from octavo.errors import UserError
from octavo.models import load_model

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
TOKENS = [(7 * step) % 96 for step in range(30)]
# Where a block of 256 elements has its float16 scales, and values under which random codes make weights of about 0.06.
HALVES = {
    "Q6_K": {208: 5e-5},
    "Q3_K": {108: 1.5e-3},
    "Q5_K": {0: 1e-4, 2: 1.5e-3},
    "IQ4_XS": {0: 4e-5},
    "Q4_K": {0: 2e-4, 2: 1.5e-3},
    "Q8_0": {0: 8e-4},
}


def random_blocks(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Bytes of a weight in which every code is random."""
    generator = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (shape[0] * shape[1] // elements, size), dtype=np.uint8)
    for place, value in HALVES[kind].items():
        blocks[:, place : place + 2] = np.frombuffer(np.float16(value).tobytes(), dtype=np.uint8)
    return blocks.reshape(shape[0], -1)


def write_gguf(path: Path, kinds: list[str]) -> None:
    """A Qwen2 whose linear layers have these types in turn."""
    config = Qwen2Config(**SIZES)
    writer = gguf.GGUFWriter(path, "qwen2")
    metadata(writer, config, "qwen2")
    generator, sizes = np.random.default_rng(0), {"attn_k": 128, "attn_v": 128}
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", generator.normal(0, 0.3, (96, 256)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(256, dtype=np.float32))
    modules = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for layer in range(SIZES["num_hidden_layers"]):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(256, dtype=np.float32))
        for bias in ("attn_q", "attn_k", "attn_v"):
            writer.add_tensor(f"blk.{layer}.{bias}.bias", np.zeros(sizes.get(bias, 256), dtype=np.float32))
        for place, module in enumerate(modules):
            kind = kinds[(layer + place) % len(kinds)]
            blocks = random_blocks(kind, (sizes.get(module, 256), 256), seed=10 * layer + place)
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"blk.{layer}.{module}.weight", blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_float8_blocks(path: Path, config: dict[str, Any] | None = None) -> None:
    """DeepSeek's kind of FP8: a scale a block of 128 x 128."""
    reference = save_random(LlamaConfig(**{**SIZES, **(config or {})}), path, std=0.06)
    writer = ShardWriter(path)
    for name, parameter in reference.named_parameters():
        if not name.endswith("_proj.weight"):
            writer.add(name, parameter.data)
            continue
        rows, columns = (-(-size // 128) for size in parameter.shape)
        scale = torch.rand(rows, columns) * 1e-3 + 1e-3
        full = scale.repeat_interleave(128, 0)[: parameter.shape[0]].repeat_interleave(128, 1)[:, : parameter.shape[1]]
        writer.add(name, (parameter.data / full).clamp(-448, 448).to(torch.float8_e4m3fn))
        writer.add(f"{name}_scale_inv", scale)
    writer.close()
    content = json.loads((path / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(content))


def plain(checkpoint: Path, folder: Path) -> Path:
    """The same model with its weights dequantized."""
    source = open_checkpoint(checkpoint)
    folder.mkdir()
    writer = ShardWriter(folder)
    for name in source.names():
        writer.add(name, source.tensor(name).float())
    writer.close()
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=["gguf", "fp8"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "gguf":
        write_gguf(tmp_path / "model.gguf", ["Q6_K", "Q3_K", "Q5_K", "IQ4_XS"])
        return tmp_path / "model.gguf"
    write_float8_blocks(tmp_path / "fp8")
    return tmp_path / "fp8"


@pytest.mark.parametrize("route", ["native", "transformers"])
def test_it_is_the_dequantized_model_rounded(route: str, checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, model_impl=route, requantize="W4A16")
    dense = load(checkpoint, model_impl=route)
    dequantized = plain(checkpoint, tmp_path / "plain")
    rounded = load(dequantized, model_impl=route, quantization="w4a16")
    got = run(model, TOKENS)
    assert torch.equal(got, run(rounded, TOKENS))
    pair = torch.stack([got.flatten(), run(dense, TOKENS).flatten()])
    assert torch.corrcoef(pair)[0, 1] > 0.9
    linear = 2 * (5 * 256 + 2 * 128) * 256  # elements of the linear layers
    dense_rest = load(dequantized, model_impl=route).weight_bytes() - 4 * linear
    bits = 8 * (model.weight_bytes() - dense_rest) / linear
    assert 4 < bits < 5, f"{bits} bits an element of the linear layers"


def test_what_has_a_kernel_stays_as_it_is_stored(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", ["Q4_K", "Q8_0"])
    kept, as_stored = load(tmp_path / "model.gguf", requantize="W4A16"), load(tmp_path / "model.gguf")
    assert kept.weight_bytes() == as_stored.weight_bytes()
    assert torch.equal(run(kept, TOKENS), run(as_stored, TOKENS))


def test_rows_that_no_group_divides_are_dequantized_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_float8_blocks(tmp_path, {"intermediate_size": 80})
    with caplog.at_level(logging.WARNING, "octavo"):
        model = load(tmp_path, requantize="W4A16")
    assert "model.layers.1.mlp.down_proj is dequantized: no group of 128, 64, 32 divides its rows of 80" in caplog.text
    assert "up_proj" not in caplog.text
    assert run(model, TOKENS).isfinite().all()


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (write_float8_blocks, {"requantize": "W8A8"}, "requantize is 'W8A8'; it must be W4A16"),
        (write_float8_blocks, {"requantize": "W4A16", "quantization": "int8"}, "quantization 'int8'.*give one"),
        (
            lambda path: save_random(LlamaConfig(**SIZES), path),
            {"requantize": "W4A16"},
            "holds no quantized weights; quantization='w4a16'",
        ),
    ],
    ids=["scheme", "both", "plain"],
)
def test_what_cannot_be_is_a_user_error(
    write: Callable[[Path], object], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_model(open_checkpoint(tmp_path), dtype=torch.float32, **options)
    assert caught.value.param == "requantize"
