"""Mixtures whose experts are stored quantized, one module each, as LLM Compressor and vLLM name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_close, check_all_schedules, load, random_tokens, reference_logits, save_random
from safetensors.torch import load_file, save_file
from test_quantized import run
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.checkpoint.writer import CompressedGroup, compressed_parameters, compressed_tensors_config
from octavo.models import load_model

# No row is a multiple of 64: rounding on load takes groups of 32 as well.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MODELS: dict[str, Any] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, head_dim=24, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32),
    "deepseek-v3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=3,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=24,
    ),
}
TOKENS8 = ActivationScheme(type="float")
SCHEMES = {
    "W4A16": WeightScheme(4, strategy="group", group_size=32),
    "W8A8": WeightScheme(8, strategy="channel", activations=ActivationScheme()),
    "FP8_DYNAMIC": WeightScheme(8, "float", strategy="channel", activations=TOKENS8),
    "FP8_BLOCK": WeightScheme(8, "float", strategy="block", block_structure=(16, 16)),
}


def rounded(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales by rounding to nearest, and the weight that they stand for."""
    rows, columns = scheme.block_structure or (1, scheme.group_size or weight.shape[1])
    blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    largest = 448.0 if scheme.type == "float" else 2.0 ** (scheme.num_bits - 1) - 1
    scale = blocks.abs().amax((1, 3), keepdim=True) / largest
    if scheme.num_bits == 4:  # as rounding on load has it: the largest weight becomes -8
        scale = blocks.gather(3, blocks.abs().argmax(3, keepdim=True)) / -8
    scaled = (blocks / scale).clamp(-largest - (scheme.num_bits == 4), largest)
    codes = scaled.to(torch.float8_e4m3fn) if scheme.type == "float" else scaled.round().to(torch.int8)
    return codes.reshape(weight.shape), scale[:, 0, :, 0], (codes.float() * scale).reshape(weight.shape)


def is_quantized(name: str) -> bool:
    return name.endswith(("_proj.weight", "_with_mqa.weight")) or ".experts." in name


def write(config: Any, folder: Path, scheme: WeightScheme, method: str = "compressed-tensors") -> tuple[Path, Any]:
    """A quantized checkpoint of a random model, and transformers' model with the same weights dequantized."""
    save_random(config, folder / "plain", std=0.15)
    tensors = load_file(folder / "plain" / "model.safetensors")
    stored, dense = {}, {}
    for name, value in tensors.items():
        if not is_quantized(name):
            stored[name] = dense[name] = value
            continue
        module = name.removesuffix(".weight")
        codes, scale, dense[name] = rounded(value, scheme)
        if method == "fp8":
            stored |= {name: codes, f"{name}_scale_inv": scale}
        else:
            stored |= compressed_parameters(module, codes, scale, scheme, scale_dtype=torch.float32)
    save_file(dense, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    (folder / "quantized").mkdir()
    save_file(stored, folder / "quantized" / "model.safetensors")
    content = json.loads((folder / "plain" / "config.json").read_text())
    content["quantization_config"] = quantization_config(scheme, method)
    (folder / "quantized" / "config.json").write_text(json.dumps(content))
    reference = AutoModelForCausalLM.from_pretrained(
        folder / "plain", attn_implementation="eager", dtype=torch.float32, experts_implementation="eager"
    )
    return folder / "quantized", reference.eval()


def quantization_config(scheme: WeightScheme, method: str) -> dict[str, Any]:
    if method == "fp8":
        return {"quant_method": "fp8", "weight_block_size": list(scheme.block_structure or ())}
    return compressed_tensors_config([CompressedGroup(scheme)], ["lm_head", "re:.*gate$"])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("scheme", "method"),
    [("W4A16", "compressed-tensors"), ("FP8_BLOCK", "compressed-tensors"), ("FP8_BLOCK", "fp8")],
)
def test_logits_equal_the_dequantized_model(scheme: str, method: str, model: str, tmp_path: Path) -> None:
    path, reference = write(MODELS[model], tmp_path, SCHEMES[scheme], method)
    check_all_schedules(load(path, model_impl="native"), reference, length=50, tolerance=1e-3)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC"])
def test_rounded_inputs_stay_near_the_dequantized_model(scheme: str, model: str, tmp_path: Path) -> None:
    """The weights alone give its logits; with the inputs rounded as well, a token may change its expert."""
    path, reference = write(MODELS[model], tmp_path, SCHEMES[scheme])
    tokens = random_tokens(SIZES["vocab_size"], 50, seed=3)
    expected = reference_logits(reference, tokens)
    got = run(load(path, model_impl="native"), tokens)
    assert not torch.allclose(got, expected, atol=1e-3), "the inputs were not rounded"
    pair = torch.stack([got.flatten(), expected.flatten()])
    assert torch.corrcoef(pair)[0, 1] > 0.98
    content = json.loads((path / "config.json").read_text())
    content["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (path / "config.json").write_text(json.dumps(content))
    assert_close(run(load(path, model_impl="native"), tokens), expected, 1e-3)


@pytest.mark.parametrize("model", ["mixtral", "qwen3-moe"])  # latents are made by a product that stays dense
def test_rounding_on_load_is_that_of_the_weights_alone(model: str, tmp_path: Path) -> None:
    """The logits are those of transformers with the same rounded weights, however far from the plain model's."""
    scheme = SCHEMES["W4A16"]
    _, reference = write(MODELS[model], tmp_path, scheme)
    save_random(MODELS[model], tmp_path / "again", std=0.15)
    loaded = load(tmp_path / "again", model_impl="native", quantization="w4a16")
    check_all_schedules(loaded, reference, length=50, tolerance=1e-3)


def dummy(config: Any, folder: Path, quantization: dict[str, Any] | None) -> Any:
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    if quantization is not None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | {"quantization_config": quantization}))
    return load_model(open_checkpoint(folder, load_format="dummy"), dtype=torch.float32)


@pytest.mark.parametrize("model", MODELS)
def test_made_up_experts_are_quantized_as_the_configuration_says(model: str, tmp_path: Path) -> None:
    scheme = SCHEMES["W4A16"]
    made_up = dummy(MODELS[model], tmp_path / "made-up", quantization_config(scheme, "compressed-tensors"))
    real, _ = write(MODELS[model], tmp_path, scheme)
    assert made_up.weight_bytes() == load(real).weight_bytes()
    assert dummy(MODELS[model], tmp_path / "dense", None).weight_bytes() == load(tmp_path / "plain").weight_bytes()
    assert run(made_up, random_tokens(SIZES["vocab_size"], 20, seed=1)).isfinite().all()


def test_experts_without_a_kernel_are_requantized(tmp_path: Path) -> None:
    path, _ = write(MODELS["qwen3-moe"], tmp_path, SCHEMES["FP8_BLOCK"], "fp8")
    tokens = random_tokens(SIZES["vocab_size"], 30, seed=3)
    requantized = load(path, model_impl="native", requantize="W4A16")
    rounded = load(tmp_path / "plain", model_impl="native", quantization="w4a16")
    assert requantized.weight_bytes() == rounded.weight_bytes()
    assert torch.equal(run(requantized, tokens), run(rounded, tokens))


def test_mixtrals_experts_may_have_the_names_of_all_others(tmp_path: Path) -> None:
    """As LLM Compressor 0.14 writes them: in Mixtral's module, but as gate_proj, up_proj and down_proj."""
    path, reference = write(MODELS["mixtral"], tmp_path, SCHEMES["W4A16"])
    tensors, renamed = load_file(path / "model.safetensors"), {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for old, new in renamed.items():
        tensors = {name.replace(f".{old}.", f".{new}."): value for name, value in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    tokens = random_tokens(SIZES["vocab_size"], 30, seed=3)
    assert_close(run(load(path, model_impl="native"), tokens), reference_logits(reference, tokens), 1e-3)
