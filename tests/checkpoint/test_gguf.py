"""GGUF against the gguf package and transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from octavo.checkpoint.gguf_blocks import QUANTIZED_TYPES, dequantize_any, repack
from octavo.checkpoint.gguf_config import llama3_factors
from octavo.checkpoint.gguf_file import GGUFFile
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.reader import open_checkpoint
from octavo.errors import CheckpointError, UnsupportedModelError

PLAIN_PARTS = {
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
Writer = Callable[..., dict[str, torch.Tensor]]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q5_0, Kind.Q5_1])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tensors_of_every_type(
    architecture: str, kind: Kind, small_models: dict[str, Any], gguf_writer: Writer, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    expected = gguf_writer(path, small_models[architecture], architecture, kind)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert name in checkpoint
        found = checkpoint.tensor(name)
        assert torch.equal(found.float(), tensor), name
    weight = checkpoint.weight("model.layers.1.self_attn.q_proj")
    plain = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    assert isinstance(weight, QuantizedWeight) == (kind not in plain)
    if kind in plain:
        assert weight.dtype == plain[kind]


HALVES = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "IQ4_XS": (0,), "TQ2_0": (64,), "IQ4_NL": (0,)}


@pytest.mark.parametrize(
    "name",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q2_K", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ2_0"],
)
def test_any_bytes_of_a_type_are_what_the_gguf_package_says(name: str) -> None:
    kind = Kind[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    blocks = generator.integers(0, 256, (6, 512 // elements, size), dtype=np.uint8)
    for place in HALVES.get(name, (0, 2) if name.endswith(("_1", "_K")) else (0,)):
        scales = generator.normal(size=blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    expected = torch.tensor(gguf.quants.dequantize(blocks.reshape(6, -1), kind))
    if name in QUANTIZED_TYPES:
        weight = repack(blocks.reshape(-1), name, (6, 512))
        assert weight.scheme.num_bits == (4 if name.startswith("Q4") else 8)
        torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(dequantize_any(blocks.reshape(-1), int(kind), (6, 512)), expected)


def test_the_demo_equals_the_gguf_package(demo_path: Path) -> None:
    checkpoint = open_checkpoint(demo_path)
    file = GGUFFile(demo_path)
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    # q and k are not among these: their rows come in another order, which the small models' test covers
    names |= {f"blk.29.{ours}.weight": f"model.layers.29.{theirs}.weight" for theirs, ours in PLAIN_PARTS.items()}
    for name, hf_name in names.items():
        tensor = file.tensors[name]
        kind = Kind(tensor.type_number)
        rows = file.raw(tensor).reshape(tensor.shape[0], -1)
        dense = gguf.quants.dequantize(rows.view(np.float32) if kind == Kind.F32 else rows, kind)
        assert torch.equal(checkpoint.tensor(hf_name), torch.tensor(dense).view(tensor.shape)), name
    assert len(checkpoint.names()) == 272
    assert checkpoint.config["tie_word_embeddings"]
    assert checkpoint.weight("model.embed_tokens").scheme.num_bits == 8
    assert checkpoint.config["rms_norm_eps"] == 1e-5
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_transformers_builds_the_same_model_from_the_config(
    architecture: str, small_models: dict[str, Any], gguf_writer: Writer, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = small_models[architecture]
    gguf_writer(tmp_path / "model.gguf", model, architecture)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    rebuilt = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config)).float()
    state = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    missing = rebuilt.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    rebuilt.tie_weights()
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(ids).logits, model.float()(ids).logits, rtol=1e-5, atol=1e-5)
    assert type(rebuilt) is type(model)


def test_rope_scaling(small_models: dict[str, Any], gguf_writer: Writer, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    factors = llama3_factors(5e5, 16, 32.0).astype(np.float32)
    gguf_writer(path, small_models["llama"], extra={"rope_freqs.weight": factors})
    assert open_checkpoint(path).config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    gguf_writer(path, small_models["llama"], extra={"rope_freqs.weight": factors * 1.5})
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        open_checkpoint(path)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    gguf_writer(path, small_models["qwen2"], "qwen2", metadata=yarn)
    assert open_checkpoint(path).config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def test_llama3_factors_are_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        rope_theta=5e5,
        rope_scaling=scaling | {"original_max_position_embeddings": 8192},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(plain / llama3_factors(5e5, 128, 8.0), scaled.numpy(), rtol=1e-5)


def test_other_architectures_are_refused_by_name(
    small_models: dict[str, Any], gguf_writer: Writer, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    gguf_writer(path, small_models["llama"], "mamba")
    with pytest.raises(UnsupportedModelError, match=r"mamba.*llama"):
        open_checkpoint(path)
    gguf_writer(path, small_models["qwen2"], "qwen2", metadata=lambda writer: writer.add_expert_count(8))
    with pytest.raises(UnsupportedModelError, match="experts"):
        open_checkpoint(path)


def test_a_missing_tensor_and_a_wrong_shape_are_named(
    small_models: dict[str, Any], gguf_writer: Writer, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    gone = "model.layers.1.mlp.up_proj.weight"
    gguf_writer(path, small_models["llama"], leave_out=gone)
    checkpoint = open_checkpoint(path)
    assert gone not in checkpoint
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        checkpoint.tensor(gone)
    with pytest.raises(CheckpointError, match=r"\[96, 64\].*\[64, 64\]"):
        checkpoint.weight("model.layers.0.mlp.up_proj", (64, 64))
    gguf_writer(path, small_models["llama"], leave_out="model.embed_tokens.weight")
    with pytest.raises(CheckpointError, match="token_embd"):
        open_checkpoint(path)


def test_every_truncation_is_told(small_models: dict[str, Any], gguf_writer: Writer, tmp_path: Path) -> None:
    path, short = tmp_path / "model.gguf", tmp_path / "short.gguf"
    gguf_writer(path, small_models["llama"], kind=Kind.Q4_1)
    whole = path.read_bytes()
    for length in [0, 3, 4, 12, 23, 24, 30, 100, 333, 700, 1500, 2500, len(whole) // 2, len(whole) - 64]:
        short.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"short\.gguf"):
            open_checkpoint(short)
    short.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"truncated: tensor 'blk\..*needs bytes \d+ to \d+, the file ends at"):
        open_checkpoint(short)


def test_a_broken_header_never_gets_further_than_an_error(
    small_models: dict[str, Any], gguf_writer: Writer, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    gguf_writer(path, small_models["llama"], kind=Kind.Q4_1)
    whole = bytearray(path.read_bytes())
    generator = np.random.default_rng(0)
    for position in generator.integers(0, 1200, 150):
        broken = bytearray(whole)
        broken[position] ^= int(generator.integers(1, 256))
        path.write_bytes(broken)
        try:
            open_checkpoint(path)
        except (CheckpointError, UnsupportedModelError) as error:
            assert str(path) in str(error)  # noqa: PT017 - a change that does no harm is fine too


def test_the_file_is_not_changed_by_its_readers(
    small_models: dict[str, Any], gguf_writer: Writer, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    gguf_writer(path, small_models["llama"])
    before = path.read_bytes()
    checkpoint = open_checkpoint(path)
    checkpoint.tensor("model.norm.weight").zero_()
    assert path.read_bytes() == before
