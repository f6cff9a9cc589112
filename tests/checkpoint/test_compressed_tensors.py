"""compressed-tensors, read and written; the package and transformers are the oracles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.codes import from_signed_codes
from octavo.checkpoint.compressed_tensors import CompressedReader
from octavo.checkpoint.config_fields import Fields
from octavo.checkpoint.quantization_config import QuantizationConfig, weight_scheme
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.checkpoint.writer import (
    CompressedGroup,
    compressed_parameters,
    compressed_tensors_config,
    signed_codes,
    write_json,
)
from octavo.errors import CheckpointError, UnsupportedModelError

WRITTEN = {
    "W4A16": WeightScheme(4, group_size=32),
    "W4A16_ASYM": WeightScheme(4, symmetric=False, group_size=16),
    "W4A16 channel": WeightScheme(4, strategy="channel"),
    "W8A16": WeightScheme(8, strategy="channel"),
    "W8A16 group": WeightScheme(8, group_size=32),
    "W8A16_ASYM": WeightScheme(8, symmetric=False, strategy="channel"),
    "W8A8": WeightScheme(8, strategy="channel", activations=ActivationScheme()),
}


class Stored:
    """Tensors in memory, as `CompressedReader` asks for them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def stored(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def has_stored(self, name: str) -> bool:
        return name in self.tensors


def quantize(weight: torch.Tensor, scheme: WeightScheme) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Round to nearest: signed codes, bf16 scales, zero points."""
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, scheme.num_groups(columns), -1)
    low, high = -(1 << (scheme.num_bits - 1)), (1 << (scheme.num_bits - 1)) - 1
    if scheme.symmetric:
        scale = (groups.abs().amax(-1) * 2 / (high - low)).to(torch.bfloat16)
        zero = None
        codes = groups / scale.float().unsqueeze(-1)
    else:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((most - least) / (high - low)).to(torch.bfloat16)
        zero = (low - least / scale.float()).round().clamp(low, high).to(torch.int8)
        codes = groups / scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)
    return codes.round().clamp(low, high).to(torch.int8).reshape(rows, columns), scale, zero


def reader_of(scheme_json: dict[str, Any], tensors: dict[str, torch.Tensor]) -> CompressedReader:
    config = QuantizationConfig.parse({"config_groups": {"group_0": scheme_json}}, Path("x"))
    return CompressedReader(config, Stored(tensors))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read(name: str) -> None:
    scheme = WRITTEN[name]
    columns = 64 if scheme.group_size else 62  # the last word of a row is not full
    codes, scale, zero = quantize(torch.randn(24, columns), scheme)
    tensors = compressed_parameters("m", codes, scale, scheme, zero)
    group = compressed_tensors_config([CompressedGroup(scheme)])["config_groups"]["group_0"]
    weight = reader_of(group, tensors).read("m.weight")
    assert isinstance(weight, QuantizedWeight)
    assert weight.scheme == scheme
    assert torch.equal(signed_codes(weight), codes)
    center = 0 if zero is None else zero.float().repeat_interleave(columns // zero.shape[1], 1)
    by_hand = (codes.float() - center) * scale.float().repeat_interleave(columns // scale.shape[1], 1)
    torch.testing.assert_close(weight.dequantize(), by_hand, rtol=1e-6, atol=1e-6)


ORACLE_SCHEMES = [
    {"num_bits": 4, "strategy": "group", "group_size": 32},
    {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    {"num_bits": 4, "strategy": "channel"},
    {"num_bits": 8, "strategy": "channel"},
    {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
    *({"num_bits": bits, "strategy": "group", "group_size": 32} for bits in (2, 3, 5, 6, 7)),
    *({"num_bits": bits, "strategy": "channel", "symmetric": False} for bits in (2, 3, 5, 6, 7)),
    {"num_bits": 8, "type": "float", "strategy": "tensor"},
    {"num_bits": 8, "type": "float", "strategy": "channel"},
    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
]


@pytest.mark.parametrize("arguments", ORACLE_SCHEMES, ids=str)
def test_reading_equals_the_package(arguments: dict[str, Any]) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor

    is_float = arguments.get("type") == "float"
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**arguments))
    compressor = BaseCompressor.get_value_from_registry("float-quantized" if is_float else "pack-quantized")
    torch.manual_seed(1)
    weight = torch.randn(48, 96)
    rows, columns = weight.shape
    shapes = {"tensor": (1,), "channel": (rows, 1), "block": (3, 3)}
    shape = shapes.get(arguments["strategy"]) or (rows, columns // arguments["group_size"])
    scale = torch.rand(shape) * 0.1 + (0.01 if is_float else 0.2)
    state = {"weight": weight, "weight_scale": scale}
    if not arguments.get("symmetric", True):
        state["weight_zero_point"] = torch.randint(-3, 4, shape, dtype=torch.int8)
    compressed = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(compressed), scheme)["weight"]
    tensors = {f"m.{name}": tensor for name, tensor in compressed.items()}
    found = reader_of({"targets": ["Linear"], "weights": arguments}, tensors).read("m.weight")
    assert isinstance(found, QuantizedWeight) == (arguments["strategy"] != "block")
    dense = found.dequantize() if isinstance(found, QuantizedWeight) else found
    torch.testing.assert_close(dense, expected.float(), rtol=1e-6, atol=1e-6)


SMALL_FLOATS = {
    "nvfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "mxfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "mxfp6-pack-quantized": {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32},
    "mxfp8-quantized": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
}


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_small_floats_equal_the_package(name: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor

    if name not in BaseCompressor.registered_names():
        pytest.skip(f"this version of compressed-tensors has no {name}")
    arguments = SMALL_FLOATS[name] | ({} if name.startswith("nv") else {"scale_dtype": "torch.uint8"})
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**arguments))
    torch.manual_seed(2)
    weight = torch.randn(8, 96).to(torch.bfloat16)
    groups = weight.float().unflatten(1, (-1, int(arguments["group_size"]))).abs().amax(-1)
    state = {"weight": weight}
    if name.startswith("nv"):
        overall = torch.tensor([448.0 * 6 / float(groups.max())])
        state |= {"weight_global_scale": overall, "weight_scale": overall * groups / 6}
    else:
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(groups)) - 2)
    compressor = BaseCompressor.get_value_from_registry(name)
    compressed = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(compressed), scheme)["weight"]
    tensors = {f"m.{key}": tensor for key, tensor in compressed.items()}
    found = reader_of({"targets": ["Linear"], "weights": arguments}, tensors).read("m.weight")
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=2**-7, atol=0)
    assert float((found - weight.float()).abs().mean()) < 0.25 * float(weight.float().abs().mean())


@pytest.mark.parametrize("name", WRITTEN)
def test_writing_equals_the_package(name: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor

    scheme = WRITTEN[name]
    codes, scale, zero = quantize(torch.randn(24, 64), scheme)
    group = compressed_tensors_config([CompressedGroup(scheme)])["config_groups"]["group_0"]
    theirs = quantization.QuantizationScheme.model_validate(group)  # refuses unknown keys
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    weight = from_signed_codes(scheme, codes, scale, zero)
    assert isinstance(weight, QuantizedWeight)
    state = {"weight": weight.dequantize(), "weight_scale": scale.float()}
    if zero is not None:
        state["weight_zero_point"] = zero
    expected = compressor.compress(state, theirs)
    found = compressed_parameters("m", codes, scale, scheme, zero)
    assert {f"m.{key}" for key in expected} == set(found)
    for key, tensor in expected.items():
        ours = found[f"m.{key}"]
        assert torch.equal(ours, tensor.to(ours.dtype)), key
        assert ours.dtype == (torch.bfloat16 if key == "weight_scale" else tensor.dtype)


def write_compressed(source: Path, directory: Path, scheme: WeightScheme) -> dict[str, torch.Tensor]:
    """The tiny model with its decoder's linear layers quantized; returns the dense state that it stands for."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    stored, dense = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            stored[name] = dense[name] = tensor.to(torch.bfloat16)
            continue
        codes, scale, zero = quantize(tensor, scheme)
        stored |= compressed_parameters(module, codes, scale, scheme, zero)
        weight = from_signed_codes(scheme, codes, scale, zero)
        assert isinstance(weight, QuantizedWeight)
        dense[name] = weight.dequantize(torch.bfloat16)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = compressed_tensors_config([CompressedGroup(scheme)], ignore=["lm_head"])
    write_json(directory / "config.json", config | {"dtype": "bfloat16"})
    return dense


@pytest.mark.parametrize("name", WRITTEN)
def test_transformers_loads_what_we_write(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    scheme = WRITTEN[name]
    dense = write_compressed(tiny_llama, tmp_path / "q", scheme)
    options: dict[str, Any] = {}
    # With activations, the inputs would be quantized as well. With zero points, compressed-tensors 0.20.1 makes them
    # unpacked on the meta device, so that transformers refuses every packed asymmetric file, its own ones too.
    if scheme.activations is not None or not scheme.symmetric:
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16, **options)
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    plain.load_state_dict(dense)
    ids = torch.arange(3, 60).unsqueeze(0)
    with torch.no_grad():
        expected, found = plain(ids).logits, theirs(ids).logits
    assert float(expected.float().std()) > 0.05  # logits that spread
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_checkpoint_reads_what_we_write(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    dense = write_compressed(tiny_llama, tmp_path / "q", WRITTEN[name])
    checkpoint = open_checkpoint(tmp_path / "q")
    assert set(checkpoint.names()) == set(dense)
    for tensor_name, tensor in dense.items():
        assert tensor_name in checkpoint
        assert torch.equal(checkpoint.tensor(tensor_name).to(torch.bfloat16), tensor), tensor_name
    weight = checkpoint.weight("model.layers.0.mlp.down_proj", (64, 128))
    assert isinstance(weight, QuantizedWeight)
    assert weight.scheme == WRITTEN[name]
    assert isinstance(checkpoint.weight("lm_head"), torch.Tensor)


def test_the_config_is_the_worked_example() -> None:
    scheme = WeightScheme(4, group_size=128)
    group = CompressedGroup(scheme, actorder="static", observer="memoryless_minmax")
    assert compressed_tensors_config([group], ["lm_head"]) == {
        "config_groups": {
            "group_0": {
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": "static",
                    "dynamic": False,
                    "group_size": 128,
                    "num_bits": 4,
                    "observer": "memoryless_minmax",
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.1",
    }
    both = compressed_tensors_config([group, CompressedGroup(WRITTEN["W8A8"], targets=("re:.*mlp.*",))])
    assert both["format"] == "mixed-precision"
    assert both["config_groups"]["group_1"]["format"] == "int-quantized"


def test_the_package_accepts_the_config() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    for scheme in WRITTEN.values():
        quantization.QuantizationConfig.model_validate(compressed_tensors_config([CompressedGroup(scheme)]))


def test_writing_refuses_what_readers_would() -> None:
    codes, scale = torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1)
    symmetric = WeightScheme(4, group_size=32)
    with pytest.raises(CheckpointError, match="zero point"):
        compressed_parameters("m", codes, scale, symmetric, torch.zeros(4, 1))
    with pytest.raises(CheckpointError, match="zero point"):
        compressed_parameters("m", codes, scale, WeightScheme(4, symmetric=False, group_size=32))
    with pytest.raises(CheckpointError, match=r"scale has shape \[4, 1\]; it must be \[4, 2\]"):
        compressed_parameters("m", codes, scale, WeightScheme(4, group_size=16))
    both = WeightScheme(8, symmetric=False, strategy="channel", activations=ActivationScheme())
    with pytest.raises(CheckpointError, match="beside int8 activations must be symmetric"):
        compressed_parameters("m", codes, scale, both, torch.zeros(4, 1))


# ------------------------------------------------------------------ the reader of quantization_config


def parse(content: dict[str, Any]) -> QuantizationConfig:
    return QuantizationConfig.parse(content, Path("x"))


def test_targets_and_ignore() -> None:
    config = parse(
        {
            "format": "pack-quantized",
            "unknown_key": 1,
            "ignore": ["lm_head", "re:.*gate$", "Embedding"],
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 64, "new_key": [1]}},
                "group_1": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "strategy": "channel"}},
                "group_2": {"targets": ["model.layers.0.mlp.down_proj"], "weights": {"num_bits": 4, "group_size": -1}},
                "attention": {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}},
            },
        }
    )
    assert config.is_ignored("lm_head")
    assert config.is_ignored("model.layers.3.mlp.gate")
    assert config.is_ignored("model.embed_tokens")
    assert not config.is_ignored("model.layers.3.mlp.gate_proj")
    schemes = {
        "model.layers.0.self_attn.q_proj": WeightScheme(4, group_size=64),
        "model.layers.1.mlp.down_proj": WeightScheme(8, strategy="channel"),
        "model.layers.0.mlp.down_proj": WeightScheme(4, strategy="channel"),
    }
    for module, scheme in schemes.items():
        group = config.group_of(module)
        assert group is not None
        assert group.scheme == scheme
    assert config.group_of("model.embed_tokens") is None


@pytest.mark.parametrize(
    ("arguments", "scheme"),
    [
        ({}, WeightScheme(8, strategy="tensor")),
        ({"num_bits": 4, "group_size": -1}, WeightScheme(4, strategy="channel")),
        ({"num_bits": 4, "group_size": 128}, WeightScheme(4, group_size=128)),
        ({"num_bits": 8, "strategy": "channel", "group_size": 128}, WeightScheme(8, strategy="channel")),
        (
            {"num_bits": 4, "group_size": 32, "symmetric": False, "actorder": None, "block_structure": None},
            WeightScheme(4, symmetric=False, group_size=32),
        ),
    ],
)
def test_a_missing_strategy_is_inferred(arguments: dict[str, Any], scheme: WeightScheme) -> None:
    assert weight_scheme(Fields(arguments, Path("x"), "weights"), None) == scheme


def test_presets_and_old_names() -> None:
    config = parse({"config_groups": {"W4A16": ["Linear"]}})
    assert config.groups[0].scheme == WeightScheme(4, group_size=128)
    content = {"config_groups": {"W8A8": ["Linear"]}, "quant_method": "compressed-tensors"}
    old = QuantizationConfig.of({"compression_config": content}, Path("x"))
    assert old is not None
    assert old.groups[0].scheme.activations == ActivationScheme()
    with pytest.raises(UnsupportedModelError, match="W5A5"):
        parse({"config_groups": {"W5A5": ["Linear"]}})


def test_a_group_index_is_followed() -> None:
    scheme = WeightScheme(4, group_size=16)
    codes, scale, _ = quantize(torch.randn(8, 64), scheme)
    order = torch.randperm(64) % 4
    tensors = compressed_parameters("m", codes, scale, scheme) | {"m.weight_g_idx": order.to(torch.int32)}
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16, "actorder": "group"}}
    found = reader_of(group, tensors).read("m.weight")
    assert isinstance(found, QuantizedWeight)
    torch.testing.assert_close(found.dequantize(), codes.float() * scale.float()[:, order])
    for wrong in (order[:-1], order + 1):
        with pytest.raises(CheckpointError, match=r"m\.weight_g_idx"):
            reader_of(group, tensors | {"m.weight_g_idx": wrong}).read("m.weight")
    straight = tensors | {"m.weight_g_idx": (torch.arange(64) // 16).to(torch.int32)}
    assert isinstance(reader_of(group, straight).read("m.weight"), QuantizedWeight)


def test_parts_that_do_not_fit_are_named() -> None:
    scheme = WeightScheme(4, symmetric=False, group_size=16)
    codes, scale, zero = quantize(torch.randn(16, 64), scheme)
    tensors = compressed_parameters("m", codes, scale, scheme, zero)
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16, "symmetric": False}}
    for part, wrong in [
        ("weight_scale", scale[:, :2]),
        ("weight_packed", tensors["m.weight_packed"][:, :-1]),
        ("weight_shape", torch.tensor([15, 64])),
        ("weight_zero_point", tensors["m.weight_zero_point"][:, :1]),
        ("weight_zero_point", tensors["m.weight_zero_point"][:1]),
    ]:
        with pytest.raises(CheckpointError, match=rf"m\.{part}"):
            reader_of(group, tensors | {f"m.{part}": wrong}).read("m.weight")
    with pytest.raises(CheckpointError, match="no group"):
        reader_of(group | {"targets": ["Conv1d"]}, tensors).read("m.weight")
    with pytest.raises(UnsupportedModelError, match="not read"):
        packed = tensors["m.weight_packed"]
        nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor", "symmetric": True}
        reader_of({"targets": ["Linear"], "weights": nvfp4}, tensors | {"m.weight_packed": packed}).read("m.weight")


def test_a_static_input_scale_is_read() -> None:
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    static = eight | {"strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "weights": eight | {"strategy": "channel"}, "input_activations": static}
    tensors = {"m.weight": torch.ones(4, 16, dtype=torch.int8), "m.weight_scale": torch.ones(4, 1)}
    given = [
        reader_of(group, tensors | {"m.input_scale": torch.tensor(scale)}).read("m.weight") for scale in (0.5, [0.25])
    ]
    parts = [part for part in given if isinstance(part, QuantizedWeight)]
    assert [part.input_scale for part in parts] == [0.5, 0.25]
    assert QuantizedWeight.concat(parts).input_scale == 0.5
    assert parts[1].select_rows(torch.tensor([2])).input_scale == 0.25
    with pytest.raises(CheckpointError, match=r"m\.input_scale is not stored"):
        reader_of(group, tensors).read("m.weight")
    for wrong in (torch.ones(2), torch.tensor(0.0)):
        with pytest.raises(CheckpointError, match=r"m\.input_scale must be one positive number"):
            reader_of(group, tensors | {"m.input_scale": wrong}).read("m.weight")
    parts[0].input_scale = None
    with pytest.raises(CheckpointError, match="static input scale, or none"):
        QuantizedWeight.concat(parts)


def test_a_missing_scale_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    write_compressed(tiny_llama, tmp_path / "q", WRITTEN["W4A16"])
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    checkpoint: Checkpoint = open_checkpoint(tmp_path / "q")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight_scale.*missing"):
        checkpoint.weight("model.layers.0.mlp.up_proj")
