"""Every scheme as it is stored, against compressed-tensors' own compressors, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.scheme import WeightScheme
from octavo.checkpoint.writer import CompressedGroup, compressed_parameters, compressed_tensors_config
from octavo.compress.observers import choose_grid
from octavo.compress.rounding import Grid, dequantize, global_scale, quantize
from octavo.compress.schemes import PRESETS

LAYER = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 256, 384
EXTRA = {
    "W3A16_ASYM": WeightScheme(3, group_size=64, symmetric=False),
    "W8A16_CHANNEL": WeightScheme(8, strategy="channel"),
    "FP8_ALONE": WeightScheme(8, "float", strategy="channel"),
}
SCHEMES = {**PRESETS, **EXTRA}


def rounded(scheme: WeightScheme, observer: str = "minmax") -> tuple[torch.Tensor, torch.Tensor, Grid]:
    """A bfloat16 weight, as most models have, its codes and its grid."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = weight.float()
    grid = choose_grid(values, None, scheme, observer, torch.bfloat16, global_scale([values], scheme))
    return weight, quantize(values, grid, scheme), grid


def stored(scheme: WeightScheme, codes: torch.Tensor, grid: Grid) -> dict[str, torch.Tensor]:
    static = scheme.activations is not None and not scheme.activations.dynamic
    return compressed_parameters(
        LAYER, codes, grid.scale, scheme, grid.zero_point, torch.bfloat16, grid.global_scale,
        torch.tensor([0.5]) if static else None,
    )  # fmt: skip


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", list(SCHEMES))
def test_stored_tensors_are_those_of_compressed_tensors(name: str) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    scheme = SCHEMES[name]
    _, codes, grid = rounded(scheme)
    config = compressed_tensors_config([CompressedGroup(scheme)])
    theirs = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor: Any = BaseCompressor.get_value_from_registry(config["format"])
    # Integers come out the same in any precision that holds them; their small floats are divided in the scale's dtype.
    state = {"weight": dequantize(codes, grid, scheme), "weight_scale": grid.scale}
    if scheme.strategy == "tensor":
        state["weight_scale"] = grid.scale.reshape(1)
    if grid.zero_point is not None:
        state["weight_zero_point"] = grid.zero_point
    if grid.global_scale is not None:
        state["weight_global_scale"] = torch.tensor([grid.global_scale])
    expected = compressor.compress(state, theirs)
    found = {key.removeprefix(f"{LAYER}."): tensor for key, tensor in stored(scheme, codes, grid).items()}
    assert set(found) - {"input_scale"} == set(expected)
    for key, tensor in expected.items():
        if key == "weight_scale" and tensor.dtype == torch.float32:
            tensor = tensor.bfloat16()
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape, key
        assert _bytes(found[key]) == _bytes(tensor), key


@pytest.mark.parametrize("name", list(SCHEMES))
def test_minmax_scales_are_those_of_compressed_tensors(name: str) -> None:
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = SCHEMES[name]
    weight, _, grid = rounded(scheme)
    values = weight.float()
    config = compressed_tensors_config([CompressedGroup(scheme)])
    theirs = QuantizationConfig.model_validate(config).config_groups["group_0"].weights
    if scheme.block_structure is not None:
        cells = values.reshape(ROWS // 128, 128, COLUMNS // 128, 128).transpose(1, 2).flatten(2)
    elif scheme.strategy == "tensor":
        cells = values.reshape(1, 1, -1)
    else:
        cells = values.reshape(ROWS, scheme.num_groups(COLUMNS), -1)
    overall = None if grid.global_scale is None else generate_gparam(values.amin(), values.amax())
    if overall is not None:
        torch.testing.assert_close(overall, torch.tensor([grid.global_scale]))
    scale, zero = calculate_qparams(cells.amin(-1), cells.amax(-1), theirs, overall)
    torch.testing.assert_close(grid.scale, scale.float(), rtol=2**-8, atol=0)
    if grid.zero_point is not None:
        assert int((grid.zero_point.int() - zero.int()).abs().max()) <= 1
        assert float((grid.zero_point.int() == zero.int()).float().mean()) > 0.95


@pytest.mark.parametrize("name", list(SCHEMES))
def test_what_is_stored_is_read_back(tmp_path: Path, name: str) -> None:
    scheme = SCHEMES[name]
    _, codes, grid = rounded(scheme, "signed")
    save_file(stored(scheme, codes, grid), tmp_path / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": compressed_tensors_config([CompressedGroup(scheme)])}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = open_checkpoint(tmp_path).tensor(f"{LAYER}.weight").float()
    torch.testing.assert_close(found, dequantize(codes, grid, scheme), rtol=1e-6, atol=1e-6)
    assert load_file(tmp_path / "model.safetensors")
