"""Quantized checkpoints, on both routes, against transformers with the dequantized weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Driver, assert_close, check_all_schedules, load, random_tokens, reference_logits, save_random
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Olmo2Config

from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.checkpoint.writer import CompressedGroup, ShardWriter, compressed_parameters, compressed_tensors_config
from octavo.layers.linear import Linear
from octavo.models import load_model

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
W4A16 = WeightScheme(num_bits=4, strategy="group", group_size=32)
W4A16_ASYM = WeightScheme(num_bits=4, symmetric=False, strategy="group", group_size=32)
W8A16 = WeightScheme(num_bits=8, strategy="channel")
W8A8 = WeightScheme(num_bits=8, strategy="channel", activations=ActivationScheme())
KEPT_DENSE = "model.layers.1.self_attn.k_proj"


def compress(reference: Any, path: Path, scheme: WeightScheme) -> None:
    """Writes `reference` with its linear layers rounded to `scheme`, and leaves it the rounded weights.

    One projection of a merged group stays dense, as a recipe's `ignore` may ask.
    """
    writer = ShardWriter(path)
    modules = {
        name: module
        for name, module in reference.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    for name, module in modules.items():
        if name == KEPT_DENSE:
            writer.add(f"{name}.weight", module.weight.data)
            continue
        codes, scale, zero = round_weight(module.weight.data, scheme)
        for key, value in compressed_parameters(name, codes, scale, scheme, zero, scale_dtype=torch.float32).items():
            writer.add(key, value)
        shift = 0 if zero is None else zero.unsqueeze(2).float()
        grouped = codes.float().unflatten(1, (scale.shape[1], -1)) - shift
        module.weight.data = (grouped * scale.unsqueeze(2)).flatten(1)
    done = {f"{name}.weight" for name in modules}
    for name, parameter in reference.named_parameters():
        if name not in done:
            writer.add(name, parameter.data)
    writer.close()
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = compressed_tensors_config([CompressedGroup(scheme)], ["lm_head", KEPT_DENSE])
    (path / "config.json").write_text(json.dumps(config))


def round_weight(weight: torch.Tensor, scheme: WeightScheme) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    grouped = weight.unflatten(1, (scheme.num_groups(weight.shape[1]), -1))
    low, high = -(2 ** (scheme.num_bits - 1)), 2 ** (scheme.num_bits - 1) - 1
    if scheme.symmetric:
        scale = grouped.abs().amax(2) / high
        return (grouped / scale.unsqueeze(2)).round().flatten(1).to(torch.int8), scale, None
    scale = (grouped.amax(2) - grouped.amin(2)) / (high - low)
    zero = (low - grouped.amin(2) / scale).round().clamp(low, high)
    codes = (grouped / scale.unsqueeze(2) + zero.unsqueeze(2)).round().clamp(low, high)
    return codes.flatten(1).to(torch.int8), scale, zero.to(torch.int8)


@pytest.mark.parametrize("route", ["native", "transformers"])
@pytest.mark.parametrize("scheme", [W4A16, W4A16_ASYM, W8A16], ids=["W4A16", "W4A16_ASYM", "W8A16"])
def test_compressed_tensors_logits_equal_the_dequantized_model(
    scheme: WeightScheme, route: str, tmp_path: Path
) -> None:
    reference = save_random(LlamaConfig(**SIZES), tmp_path, std=0.15)
    compress(reference, tmp_path, scheme)
    model = load(tmp_path, model_impl=route)
    assert_close_everywhere(model, reference, 1e-3)


def test_int8_activations_stay_within_their_rounding(tmp_path: Path) -> None:
    reference = save_random(LlamaConfig(**SIZES), tmp_path, std=0.15)
    compress(reference, tmp_path, W8A8)
    assert_close_everywhere(load(tmp_path), reference, 0.15)


@pytest.mark.parametrize(("strategy", "dynamic"), [("channel", True), ("tensor", False), ("channel", None)])
def test_float8_checkpoints(strategy: str, dynamic: bool | None, tmp_path: Path) -> None:
    """Dynamic tokens, a static scale and float8 weights alone, as LLM Compressor writes them."""
    reference = save_random(LlamaConfig(**SIZES), tmp_path, std=0.15)
    writer = ShardWriter(tmp_path)
    for name, parameter in reference.named_parameters():
        if not name.endswith("_proj.weight"):
            writer.add(name, parameter.data)
            continue
        largest = parameter.data.abs().amax(None if strategy == "tensor" else 1, keepdim=True)
        scale = largest / 448
        codes = (parameter.data / scale).to(torch.float8_e4m3fn)
        parameter.data = codes.float() * scale
        writer.add(name, codes)
        writer.add(f"{name}_scale", scale.flatten() if strategy == "tensor" else scale)
        if dynamic is False:
            writer.add(f"{name.removesuffix('weight')}input_scale", torch.tensor([0.5]))
    writer.close()
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    tokens = None
    if dynamic is not None:
        tokens = eight | {"strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    group = {"targets": ["Linear"], "weights": eight | {"strategy": strategy}, "input_activations": tokens}
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path)
    kinds = {packed.input_kind for layer in model.layers for packed in layer.attention.qkv.packed}
    assert kinds == {None if dynamic is None else "fp8"}
    scales = {packed.input_scale for layer in model.layers for packed in layer.attention.qkv.packed}
    assert scales == {0.5 if dynamic is False else None}
    assert_close_everywhere(model, reference, 1e-3 if dynamic is None else 0.4)


def assert_close_everywhere(model: Any, reference: Any, tolerance: float) -> None:
    check_all_schedules(model, reference, length=60, tolerance=tolerance)


def test_projections_in_one_format_are_merged_and_others_kept_apart(tmp_path: Path) -> None:
    compress(save_random(LlamaConfig(**SIZES), tmp_path, std=0.15), tmp_path, W4A16)
    model = load(tmp_path)
    layers = [layer.attention.qkv for layer in model.layers]
    assert [len(layer.packed) for layer in layers] == [1, 3]
    dense = Linear([torch.zeros(8, 64), torch.zeros(4, 64)], None, torch.float32)
    assert [packed.shape for packed in dense.packed] == [(12, 64)]


def test_quantized_weights_are_kept_quantized(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4})
    reference = save_random(config, tmp_path)
    plain = load(tmp_path).weight_bytes()
    compress(reference, tmp_path, W4A16)
    for route in ("native", "transformers"):
        assert load(tmp_path, model_impl=route).weight_bytes() < 0.5 * plain


def test_columns_in_activation_order_stay_quantized(tmp_path: Path) -> None:
    """As GPTQ with desc_act stores them: projections of one input share an order, and are still one product."""
    reference = save_random(LlamaConfig(**SIZES), tmp_path, std=0.15)
    plain = load(tmp_path).weight_bytes()
    writer = ShardWriter(tmp_path)
    for name, parameter in reference.named_parameters():
        if not name.endswith("_proj.weight"):
            writer.add(name, parameter.data)
            continue
        module, columns = name.removesuffix(".weight"), parameter.shape[1]
        groups = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) % (columns // 32)
        order = torch.argsort(groups, stable=True)
        codes, scale, _ = round_weight(parameter.data[:, order], W4A16)
        rounded = (codes.float().unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(2)).flatten(1)
        parameter.data, stored = torch.empty_like(rounded), torch.empty_like(codes)
        parameter.data[:, order], stored[:, order] = rounded, codes
        parts = compressed_parameters(module, stored, scale, W4A16, scale_dtype=torch.float32)
        for key, value in (parts | {f"{module}.weight_g_idx": groups.to(torch.int32)}).items():
            writer.add(key, value)
    writer.close()
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = compressed_tensors_config([CompressedGroup(W4A16)], ["lm_head"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path, model_impl="native")
    assert all(len(layer.attention.qkv.packed) == 1 for layer in model.layers)
    assert model.weight_bytes() < 0.6 * plain
    assert_close_everywhere(model, reference, 1e-3)
    assert load(tmp_path, torch.bfloat16)._fused is None


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.05), ("fp8", 0.2), ("w4a16", 0.5)])
@pytest.mark.parametrize("route", ["native", "transformers"])
def test_quantization_on_load(quantization: str, tolerance: float, route: str, tmp_path: Path) -> None:
    reference = save_random(LlamaConfig(**SIZES), tmp_path, std=0.15)
    plain = load(tmp_path, model_impl=route)
    model = load(tmp_path, model_impl=route, quantization=quantization)
    tokens = random_tokens(SIZES["vocab_size"], 40, seed=1)
    expected = reference_logits(reference, tokens)
    assert model.weight_bytes() < plain.weight_bytes()
    got = run(model, tokens)
    assert (got - expected).norm() < tolerance * expected.norm()
    assert (got - expected).abs().max() > 1e-3, "nothing was quantized"


def run(model: Any, tokens: list[int], chunk: int | None = None) -> torch.Tensor:
    driver = Driver(model)
    sequence = driver.add(tokens)
    while sequence.computed < len(tokens):
        driver.step([(sequence, min(chunk or len(tokens), len(tokens) - sequence.computed))])
    return torch.stack([sequence.logits[position] for position in range(len(tokens))])


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SIZES), Olmo2Config(**SIZES), MixtralConfig(**SIZES, num_local_experts=2)]
)
def test_dummy_weights_need_the_configuration_alone(config: Any, tmp_path: Path) -> None:
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    model = load_model(open_checkpoint(tmp_path, load_format="dummy"), dtype=torch.float32)
    logits = run(model, random_tokens(SIZES["vocab_size"], 20, seed=1))
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.fixture(scope="module")
def demo_logits(demo_path: Path) -> tuple[Any, list[int], torch.Tensor]:
    """The demo checkpoint, a text, and the logits of transformers' Llama with its weights dequantized to float32."""
    checkpoint = open_checkpoint(demo_path)
    config = LlamaConfig(**{key: value for key, value in checkpoint.config.items() if key != "architectures"})
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: checkpoint.tensor(name).float() for name in checkpoint.names()}
    reference = reference.to_empty(device="cpu").eval()
    reference.load_state_dict(weights, strict=False)
    reference.tie_weights()
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)
    tokens = checkpoint.load_tokenizer()("The capital of France is Paris, and the capital of Italy is")["input_ids"]
    return checkpoint, tokens, reference_logits(reference, tokens)


def test_demo_model_in_float32(demo_logits: tuple[Any, list[int], torch.Tensor]) -> None:
    """4-bit weights are multiplied in float32, or by int8 products whose rounding stays below 2 % of the spread."""
    checkpoint, tokens, expected = demo_logits
    got = run(load_model(checkpoint, dtype=torch.float32), tokens)
    assert_close(got, expected, 0.02)
    assert got[-1].argmax() == expected[-1].argmax()


def test_demo_model_in_bfloat16(demo_logits: tuple[Any, list[int], torch.Tensor]) -> None:
    """bfloat16 rounds each of 30 layers' activations to 8 bits: 5 % of the spread. Chunks end in the same logits."""
    checkpoint, tokens, expected = demo_logits
    model = load_model(checkpoint, dtype=torch.bfloat16)
    for chunk in (None, 5, 1):
        got = run(model, tokens, chunk)
        assert_close(got, expected, 0.05)
        assert got[-1].argmax() == expected[-1].argmax()
