"""Mixtral: Mistral's attention, with routed experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.layers.experts import ExpertsConfig, Routing
from octavo.models.decoder_config import DecoderConfig
from octavo.models.llama import mistral_config


def mixtral_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a MixtralForCausalLM: the weights of a token's experts add up to one."""
    decoder = mistral_config({"rms_norm_eps": 1e-5, "rope_theta": 1e6, **config})
    count = config.get("num_local_experts") or config.get("num_experts") or 8
    routing = Routing(count, config.get("num_experts_per_tok", 2), normalizes=True)
    layers = (True,) * decoder.num_layers
    return replace(decoder, experts=ExpertsConfig(routing, decoder.intermediate_size, layers))
