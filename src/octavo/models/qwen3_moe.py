"""Qwen3-MoE: Qwen3's attention, with routed experts in all layers but those that are told to be dense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.layers.experts import ExpertsConfig, Routing
from octavo.models.decoder_config import DecoderConfig, required
from octavo.models.qwen3 import qwen3_decoder


def qwen3_moe_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a Qwen3MoeForCausalLM, whose window is that of every layer."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    layers = required(config, "num_hidden_layers")
    return replace(qwen3_decoder(config, (window,) * layers), experts=_experts(config, layers))


def _experts(config: dict[str, Any], num_layers: int) -> ExpertsConfig:
    every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    count = config.get("num_experts") or config.get("num_local_experts") or 128
    routing = Routing(count, config.get("num_experts_per_tok", 8), normalizes=bool(config.get("norm_topk_prob", False)))
    layers = tuple(index not in dense and (index + 1) % every == 0 for index in range(num_layers))
    return ExpertsConfig(routing, config.get("moe_intermediate_size", 768), layers)
