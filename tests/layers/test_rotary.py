"""Rotary frequencies equal transformers', for every scaling that is served, beyond the original context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.errors import UnsupportedModelError
from octavo.layers.rotary import RopeConfig, cos_sin_table, inverse_frequencies

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-attention": {"factor": 4.0, "attention_factor": 0.8, "original_max_position_embeddings": 512},
    "yarn-betas": {"factor": 4.0, "beta_fast": 16, "beta_slow": 2, "original_max_position_embeddings": 512},
    "yarn-mscale": {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 512},
    "yarn-truncate": {"factor": 4.0, "truncate": False, "original_max_position_embeddings": 512},
}


@pytest.mark.parametrize("theta", [500.0, 10000.0, 1e6])
@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name: str, theta: float) -> None:
    parameters = {"rope_type": name.split("-")[0], "rope_theta": theta, **SCALINGS[name]}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=dict(parameters)
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(2048)[None])
    table = cos_sin_table(RopeConfig.from_config({"rope_parameters": parameters}, 64, 2048), 2048)
    torch.testing.assert_close(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1), atol=2e-4, rtol=0)


def test_old_and_new_configuration_files_mean_the_same() -> None:
    scaling = SCALINGS["llama3"]
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}}
    old = {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **scaling}}
    assert RopeConfig.from_config(new, 64, 2048) == RopeConfig.from_config(old, 64, 2048)


def test_original_context_may_stand_outside_of_the_rope_parameters() -> None:
    config = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    inside = {"rope_theta": 1e4, "rope_scaling": {**config["rope_scaling"], "original_max_position_embeddings": 256}}
    outside = {**config, "original_max_position_embeddings": 256}
    assert RopeConfig.from_config(inside, 64, 1024) == RopeConfig.from_config(outside, 64, 1024)
    plain, _ = inverse_frequencies(RopeConfig.from_config(config, 64, 1024), 1024)
    assert not torch.equal(plain, inverse_frequencies(RopeConfig.from_config(outside, 64, 1024), 1024)[0])


def test_partial_rotation_shortens_the_table() -> None:
    assert cos_sin_table(RopeConfig.from_config({"partial_rotary_factor": 0.5}, 64, 16), 16).shape == (16, 32)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "longrope"}, "longrope"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 2}, "low_freq_factor"),
    ],
)
def test_what_cannot_be_computed_is_named(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        inverse_frequencies(RopeConfig.from_config({"rope_parameters": parameters}, 64, 128), 128)
