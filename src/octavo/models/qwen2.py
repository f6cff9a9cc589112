"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and sliding windows in the upper layers when switched on."""

from __future__ import annotations

from typing import Any

from octavo.models.decoder import DecoderConfig, common_fields


def qwen2_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a Qwen2ForCausalLM."""
    fields = common_fields(config)
    fields["windows"] = layer_windows(config, fields["num_layers"])
    return DecoderConfig(**fields, qkv_bias=True)


def layer_windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types` where given, else from layer `max_window_layers` on."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        types = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types[:num_layers])
