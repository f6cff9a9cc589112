"""GPTQ, AWQ, FP8, MXFP4 and sparse files, packed here bit by bit as their formats say, and what is refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.checkpoint.methods import module_reader
from octavo.checkpoint.module_reader import ModuleReader
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.reader import open_checkpoint
from octavo.errors import CheckpointError, OctavoError, UnsupportedModelError

Tensors = dict[str, torch.Tensor]


class Stored:
    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def stored(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name!r} is missing")
        return self.tensors[name]

    def has_stored(self, name: str) -> bool:
        return name in self.tensors


def reader_of(config: dict[str, Any], tensors: Tensors) -> ModuleReader:
    reader = module_reader({"quantization_config": config}, Path("x"), Stored(tensors))
    assert reader is not None
    return reader


def stream(values: np.ndarray, bits: int) -> torch.Tensor:
    """Each row of unsigned values [R, C] as one little-endian number of C * bits bits, cut into int32 words."""
    rows = []
    for row in values.tolist():
        number = sum(value << (index * bits) for index, value in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(len(row) * bits // 8, "little"), dtype=np.int32))
    return torch.tensor(np.stack(rows))


def gptq(bits: int, version: int, order: np.ndarray, rows: int = 32) -> tuple[Tensors, torch.Tensor]:
    """Random codes [K, N], stored; and the weight [N, K] that they stand for."""
    generator = np.random.default_rng(bits + version)
    columns, groups = len(order), int(order.max()) + 1
    codes = generator.integers(0, 1 << bits, (columns, rows))
    zeros = generator.integers(0, 1 << bits, (groups, rows))
    scales = generator.random((groups, rows)).astype(np.float16)
    stored = (zeros - 1) % (1 << bits) if version == 1 else zeros
    tensors = {
        "m.qweight": stream(codes.T, bits).T.contiguous(),
        "m.qzeros": stream(stored, bits),
        "m.scales": torch.tensor(scales),
        "m.g_idx": torch.tensor(order, dtype=torch.int32),
        "m.bias": torch.zeros(rows),
    }
    weight = (codes - zeros[order]).astype(np.float32) * scales.astype(np.float32)[order]
    return tensors, torch.tensor(weight.T)


@pytest.mark.parametrize("activation_order", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, version: int, activation_order: bool) -> None:
    order = np.arange(96) // 32
    if activation_order:
        order = np.random.default_rng(0).permutation(order)
    tensors, weight = gptq(bits, version, order)
    config = {"quant_method": "gptq", "bits": bits, "sym": False, "desc_act": activation_order, "group_size": 32}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    reader = reader_of(config, tensors)
    assert [reader.dense_name(name) for name in tensors] == ["m.weight", None, None, None, "m.bias"]
    found = reader.read("m.weight")
    assert isinstance(found, QuantizedWeight)
    assert (found.order is not None) == activation_order
    torch.testing.assert_close(found.dequantize(), weight, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(found.rows(torch.tensor([[3], [1]])), weight[[3, 1]][:, None], rtol=1e-6, atol=2e-5)


def test_gptq_groups_of_different_sizes_come_dense() -> None:
    order = np.array([0] * 33 + [1] * 31)
    tensors, weight = gptq(4, 1, np.random.default_rng(0).permutation(order))
    found = reader_of({"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True}, tensors).read("m.weight")
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, weight, rtol=1e-6, atol=2e-5)


def test_the_words_of_symmetric_gptq() -> None:
    """The published constants: every symmetric 4-bit zero point is 0x77777777 in version 1, 0x88888888 in version 2."""
    order = np.zeros(8, dtype=int)
    for version, word in ((1, 0x77777777), (2, 0x88888888)):
        tensors, _ = gptq(4, version, order, rows=8)
        tensors["m.qzeros"] = (
            torch.tensor([[word]]).to(torch.int32) if word < 1 << 31 else torch.tensor([[word - 2**32]])
        )
        tensors["m.qzeros"] = tensors["m.qzeros"].to(torch.int32)
        del tensors["m.g_idx"]
        config = {"quant_method": "gptq", "bits": 4, "sym": True, "checkpoint_format": ("gptq", "gptq_v2")[version - 1]}
        found = reader_of(config, tensors).read("m.weight")
        assert isinstance(found, QuantizedWeight)
        assert found.scheme.symmetric
        assert found.scale.dtype == torch.float16


def test_gptq_overrides_by_module() -> None:
    tensors, weight = gptq(8, 1, np.zeros(32, dtype=int))
    config = {"quant_method": "gptq", "bits": 4, "sym": False, "dynamic": {"+:m$": {"bits": 8}, "-:lm_head": {}}}
    found = reader_of(config, tensors).read("m.weight")
    assert isinstance(found, QuantizedWeight)
    torch.testing.assert_close(found.dequantize(), weight, rtol=1e-6, atol=2e-5)


def test_awq() -> None:
    generator = np.random.default_rng(5)
    codes, zeros = generator.integers(0, 16, (64, 24)), generator.integers(0, 16, (2, 24))
    scales = generator.random((2, 24)).astype(np.float16)

    def words(values: np.ndarray) -> torch.Tensor:
        """Columns 0 to 7 of a word, from the lowest nibble on, are 0, 2, 4, 6, 1, 3, 5, 7."""
        return stream(values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(values), -1), 4)

    tensors = {"m.qweight": words(codes), "m.qzeros": words(zeros), "m.scales": torch.tensor(scales)}
    reader = reader_of({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, tensors)
    found = reader.read("m.weight")
    assert isinstance(found, QuantizedWeight)
    assert found.scheme.group_size == 32
    order = np.arange(64) // 32
    weight = (codes - zeros[order]).astype(np.float32) * scales.astype(np.float32)[order]
    torch.testing.assert_close(found.dequantize(), torch.tensor(weight.T), rtol=1e-6, atol=2e-5)
    # The published order: the columns 0 to 7 of one word give 0x75316420.
    assert int(words(np.arange(8)[None])[0, 0]) == 0x75316420
    for version in ("gemv", "gemv_fast", "marlin", "llm-awq"):
        with pytest.raises(UnsupportedModelError, match=version):
            reader_of({"quant_method": "awq", "version": version}, tensors)


def test_fp8_blocks_as_transformers_dequantizes_them() -> None:
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3) + 0.1
    tensors = {"m.weight": weight, "m.weight_scale_inv": scale}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    reader = reader_of(config, tensors)
    found = reader.read("m.weight")
    assert isinstance(found, torch.Tensor)
    for row, column in [(0, 0), (127, 127), (128, 128), (199, 299), (5, 256)]:
        by_hand = float(weight[row, column].float()) * float(scale[row // 128, column // 128])
        assert float(found[row, column]) == pytest.approx(by_hand, rel=1e-6)
    assert reader.dense_name("m.weight_scale_inv") is None
    with pytest.raises(CheckpointError, match=r"m\.weight_scale_inv has shape \[1, 3\].*needs \[2, 3\]"):
        reader_of(config, tensors | {"m.weight_scale_inv": scale[:1]}).read("m.weight")


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_fp8_with_one_scale(activations: str) -> None:
    weight = torch.randn(16, 32).to(torch.float8_e4m3fn)
    tensors = {"m.weight": weight, "m.weight_scale": torch.tensor(0.5), "m.input_scale": torch.tensor(0.25)}
    found = reader_of({"quant_method": "fp8", "activation_scheme": activations}, tensors).read("m.weight")
    assert isinstance(found, QuantizedWeight)
    assert found.input_scale == (0.25 if activations == "static" else None)
    assert found.scheme.activations is not None
    assert torch.equal(found.dequantize(), weight.float() * 0.5)
    plain = reader_of({"quant_method": "fp8"}, {"m.weight": torch.ones(2, 2)})
    assert not plain.holds("m.weight")


def test_mxfp4_experts_as_transformers_dequantizes_them() -> None:
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 134, (2, 6, 3), dtype=torch.uint8)
    reader = reader_of({"quant_method": "mxfp4"}, {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales})
    expected = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(reader.read("e.down_proj"), expected)
    assert reader.dense_name("e.down_proj_blocks") == "e.down_proj"


@pytest.mark.parametrize("kind", ["sparse-24-bitmask", "sparse-bitmask"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_sparse_files(kind: str, dtype: torch.dtype) -> None:
    """Rows of ten do not fill whole bytes of the mask."""
    generator = torch.Generator().manual_seed(1)
    columns = 12 if kind == "sparse-24-bitmask" else 10
    weight = torch.randint(1, 8, (6, columns), generator=generator).float()
    keep = torch.tensor([True, False, False, True]).repeat(6, 3)[:, :columns]
    values = weight[keep].to(dtype)
    mask = np.packbits(keep.numpy(), axis=1, bitorder="little")
    tensors = {
        "m.compressed": values.view(6, -1) if kind == "sparse-24-bitmask" else values,
        "m.bitmask": torch.tensor(mask),
        "m.shape": torch.tensor([[6], [columns]]),
        "m.row_offsets": torch.arange(6),
    }
    config: dict[str, Any] = {"sparsity_config": {"format": kind, "targets": ["Linear"]}}
    expected = weight * keep
    if dtype != torch.bfloat16:
        tensors["m.weight_scale"] = torch.rand(6, 1)
        kind_of = "int" if dtype == torch.int8 else "float"
        weights = {"num_bits": 8, "type": kind_of, "strategy": "channel"}
        config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
        expected = expected * tensors["m.weight_scale"]
    reader = reader_of(config, tensors)
    assert reader.holds("m.weight")
    found = reader.read("m.weight")
    dense = found.dequantize() if isinstance(found, QuantizedWeight) else found.float()
    torch.testing.assert_close(dense, expected)
    assert {reader.dense_name(name) for name in tensors} == {"m.weight", None}
    with pytest.raises(CheckpointError, match=r"m\.compressed has"):
        reader_of(config, tensors | {"m.compressed": values[:-1]}).read("m.weight")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 5}, "bits is 5"),
        ({"sparsity_config": {"format": "marlin-24"}}, "marlin-24"),
        ({"config_groups": {"W5A5": ["Linear"]}}, "W5A5"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        reader_of(config, {})


def test_the_configuration_that_older_tools_keep_apart(tiny_llama: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "sym": False}))
    tensors, weight = gptq(4, 1, np.arange(96) // 32)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names() == ["m.bias", "m.weight"]
    assert "m.weight" in checkpoint
    torch.testing.assert_close(checkpoint.tensor("m.weight"), weight, rtol=1e-6, atol=2e-5)
    with pytest.raises(CheckpointError, match=r"\[32, 96\].*\[32, 95\]"):
        checkpoint.weight("m", (32, 95))


# ------------------------------------------------------------------ whatever a configuration holds

VALUES: list[Any] = [
    *(None, True, 0, -1, 3, 4, 8, 128, 1e30, 0.5, float("nan")),
    *("", "x", "4", "int", "float", "group", "block"),
    *("re:(", "re:.*", [], ["re:["], ["Linear"], [[128]], [128, 128], {}, {"x": 1}, "128x128", "gptq_v2", "awq", "fp8"),
]
SEEDS: list[dict[str, Any]] = [
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8},
        "sparsity_config": {"format": "dense"},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "type": "int", "symmetric": False},
                "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
            }
        },
    },
    {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq", "dynamic": {"+:m": {"bits": 8}}},
    {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 32},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static", "fmt": "e4m3"},
    {"quant_method": "mxfp4"},
    {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
]


def mutate(value: Any, generator: random.Random) -> Any:
    """The same object with one place, at any depth, changed, removed or added."""
    if not isinstance(value, dict) or not value or generator.random() < 0.15:
        return generator.choice(VALUES)
    key, changed = generator.choice(list(value)), dict(value)
    action = generator.random()
    if action < 0.2:
        del changed[key]
    elif action < 0.3:
        changed[generator.choice(["group_1", "weights", "block_structure", "new"])] = generator.choice(VALUES)
    else:
        changed[key] = mutate(value[key], generator)
    return changed


def stored_kinds() -> list[Tensors]:
    """What the first methods of SEEDS store for one module; then wrong shapes and dtypes by the same names."""
    names = ["weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "qweight"]
    names += ["qzeros", "scales", "g_idx", "weight_scale_inv", "input_scale", "compressed", "bitmask", "shape"]
    packed = {
        "m.weight_packed": torch.zeros(8, 8, dtype=torch.int32),
        "m.weight_scale": torch.ones(8, 2),
        "m.weight_shape": torch.tensor([8, 64]),
        "m.weight_zero_point": torch.zeros(1, 2, dtype=torch.int32),
    }
    wrong = [torch.ones(()), torch.zeros(0), torch.ones(8), torch.zeros(8, 8, dtype=torch.int32), torch.ones(2, 2, 2)]
    wrong += [torch.zeros(8, 8, dtype=torch.uint8), torch.zeros(8, 8, dtype=torch.int8), torch.tensor([8, 64])]
    wrong += [torch.zeros(8, 8).to(torch.float8_e4m3fn)]
    awq = {"m.qweight": torch.zeros(64, 4, dtype=torch.int32), "m.scales": torch.ones(2, 32)}
    fp8 = {"m.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "m.weight_scale_inv": torch.ones(1, 1)}
    fp8["m.input_scale"] = torch.ones(())
    return [
        packed,
        gptq(4, 1, np.arange(64) // 32)[0],
        awq,
        fp8,
        *({f"m.{name}": part for name in names} for part in wrong),
    ]


def test_only_our_errors_escape_from_any_configuration() -> None:
    generator, kinds = random.Random(0), stored_kinds()
    seen = {"read": 0, "refused": 0}
    for _ in range(4000):
        method = generator.randrange(len(SEEDS))
        config = SEEDS[method]
        for _ in range(generator.randrange(4)):
            config = mutate(config, generator)
        tensors = dict(kinds[method] if generator.random() < 0.7 else generator.choice(kinds))
        if generator.random() < 0.5 and tensors:
            tensors[generator.choice(list(tensors))] = next(iter(generator.choice(kinds).values()))
        try:
            reader = module_reader({"quantization_config": config}, Path("x"), Stored(tensors))
            if reader is not None and reader.holds("m.weight"):
                reader.read("m.weight")
                seen["read"] += 1
        except OctavoError:
            seen["refused"] += 1
    assert min(seen.values()) > 100, seen
