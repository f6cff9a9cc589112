"""Schemes by name and as config groups, group sizes that fit, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.compress.schemes import PRESETS, fit_group, preset, scheme_groups, with_group_size
from octavo.errors import UserError

TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}


def test_presets() -> None:
    assert preset("w4a16") == WeightScheme(4, strategy="group", group_size=128)
    assert preset("W8A16") == WeightScheme(8, strategy="group", group_size=128)
    assert preset("INT8") == preset("W8A8") == WeightScheme(8, strategy="channel", activations=ActivationScheme())
    with pytest.raises(UserError, match="unknown scheme 'W5'; the schemes that work are W4A16, W4A16_ASYM"):
        preset("W5")


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_are_those_of_compressed_tensors(name: str) -> None:
    from compressed_tensors.quantization import preset_name_to_scheme

    theirs, ours = preset_name_to_scheme(name, ["Linear"]), preset(name)
    assert theirs.weights is not None
    block = theirs.weights.block_structure
    written = (theirs.weights.num_bits, theirs.weights.type, theirs.weights.symmetric, theirs.weights.strategy)
    assert written == (ours.num_bits, ours.type, ours.symmetric, ours.strategy)
    assert theirs.weights.group_size == ours.group_size
    assert (None if block is None else tuple(block)) == ours.block_structure
    inputs = theirs.input_activations
    assert (inputs is None) == (ours.activations is None)
    if inputs is not None and ours.activations is not None:
        assert (inputs.num_bits, inputs.type, inputs.strategy) == (8, ours.activations.type, ours.activations.strategy)
        assert (inputs.dynamic, inputs.group_size) == (ours.activations.dynamic, ours.activations.group_size)


def test_groups_that_fit() -> None:
    scheme = preset("W4A16")
    sizes = [(fit_group(scheme, columns) or scheme).group_size for columns in (1536, 576, 96)]
    assert sizes == [128, 64, 32]
    assert fit_group(scheme, 100) is None
    assert fit_group(with_group_size(scheme, 32), 40) is None
    assert with_group_size(scheme, -1) == WeightScheme(4, strategy="channel")
    with pytest.raises(UserError, match="group size 0"):
        with_group_size(scheme, 0)
    for fixed in ("W8A8", "NVFP4A16", "FP8"):
        with pytest.raises(UserError, match="their format fixes it"):
            with_group_size(preset(fixed), 64)


def test_layers_that_blocks_do_not_divide_get_a_scale_a_row() -> None:
    assert fit_group(preset("FP8_BLOCK"), 256, 384) == preset("FP8_BLOCK")
    assert fit_group(preset("FP8_BLOCK"), 576, 384) == preset("FP8_DYNAMIC")
    assert fit_group(preset("FP8_BLOCK"), 256, 192) == preset("FP8_DYNAMIC")
    assert fit_group(preset("NVFP4A16"), 40) is None


def test_config_groups() -> None:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    groups = scheme_groups(None, (), {"group_0": {"targets": ["Linear"], "weights": weights}})
    assert groups[0].scheme == WeightScheme(4, group_size=64)
    int8 = {"num_bits": 8, "strategy": "channel"}
    eight = scheme_groups(None, (), {"g": {"targets": "Linear", "weights": int8, "input_activations": TOKENS}})
    assert eight[0].scheme == preset("W8A8")
    assert scheme_groups({"W4A16": ["re:.*mlp"]}, (), None)[0].targets == ("re:.*mlp",)


@pytest.mark.parametrize("name", list(PRESETS))
def test_config_groups_spell_presets_out(name: str) -> None:
    from octavo.checkpoint.compressed_writer import CompressedGroup, compressed_tensors_config

    written = compressed_tensors_config([CompressedGroup(preset(name))])["config_groups"]
    assert scheme_groups(None, (), written)[0].scheme == preset(name)


@pytest.mark.parametrize(
    ("weights", "activations", "message"),
    [
        ({"num_bits": 1, "group_size": 64}, None, "weights .* are not written; what is: int of 2 to 8 bits"),
        ({"num_bits": 4, "type": "float", "group_size": 64}, None, "are not written"),
        ({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": False}, None, "are not written"),
        ({"num_bits": 4, "group_size": 64, "symmetric": False}, TOKENS, "are not written"),
        ({"num_bits": 4, "group_size": 64}, TOKENS | {"type": "float"}, "are not written"),
        ({"num_bits": 8, "strategy": "channel"}, TOKENS | {"num_bits": 4}, "input_activations .* are not written"),
        ({"num_bits": 8, "strategy": "channel"}, {"strategy": "tensor", "symmetric": False}, "int and dynamic"),
        ({"num_bits": 8, "strategy": "channel", "actorder": "group"}, None, "are not there yet; leave them out"),
        ({"num_bits": 8, "strategy": "channel", "bits": 3}, None, "unknown weights keys"),
    ],
)
def test_config_groups_that_are_refused(
    weights: dict[str, Any], activations: dict[str, Any] | None, message: str
) -> None:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    with pytest.raises(UserError, match=message):
        scheme_groups(None, (), {"group_0": group})
