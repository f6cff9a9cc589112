"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and sliding windows in the upper layers when switched on."""

from __future__ import annotations

from typing import Any

from octavo.models.decoder_config import DecoderConfig, common_fields
from octavo.models.layer_kinds import FULL, SLIDING, layer_kinds


def qwen2_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a Qwen2ForCausalLM."""
    fields = common_fields(config)
    fields["windows"] = layer_windows(config, fields["num_layers"])
    return DecoderConfig(**fields, qkv_bias=True)


def layer_windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types` where given, else from layer `max_window_layers` on."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    first = config.get("max_window_layers", 28)
    by_index = [SLIDING if index >= first else FULL for index in range(num_layers)]
    kinds = layer_kinds(config, num_layers, by_index)
    return tuple(window if kind == SLIDING else None for kind in kinds)
