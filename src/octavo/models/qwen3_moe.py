"""Qwen3-MoE: Qwen3's attention, with routed experts in all layers but those that are told to be dense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.layers.experts import ExpertsConfig, Routing
from octavo.models.decoder_config import DecoderConfig, required
from octavo.models.qwen3 import qwen3_config


def qwen3_moe_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a Qwen3MoeForCausalLM; a head has hidden_size / heads elements unless it says so."""
    heads = required(config, "num_attention_heads")
    head_dim = config.get("head_dim") or required(config, "hidden_size") // heads
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    decoder = qwen3_config({**config, "head_dim": head_dim})
    return replace(decoder, windows=(window,) * decoder.num_layers, experts=_experts(config, decoder.num_layers))


def _experts(config: dict[str, Any], num_layers: int) -> ExpertsConfig:
    every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    count = config.get("num_experts") or config.get("num_local_experts") or 128
    routing = Routing(count, config.get("num_experts_per_tok", 8), normalizes=bool(config.get("norm_topk_prob", False)))
    layers = tuple(index not in dense and (index + 1) % every == 0 for index in range(num_layers))
    return ExpertsConfig(routing, config.get("moe_intermediate_size", 768), layers)
