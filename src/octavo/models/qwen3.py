"""Qwen3 (dense): Qwen2's layers with normalized query and key heads, and a head size of its own."""

from __future__ import annotations

from typing import Any

from octavo.models.decoder_config import DecoderConfig, common_fields, required
from octavo.models.qwen2 import layer_windows


def qwen3_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a Qwen3ForCausalLM; a head has 128 elements unless the file says otherwise."""
    return qwen3_decoder({"head_dim": 128, **config}, layer_windows(config, required(config, "num_hidden_layers")))


def qwen3_decoder(config: dict[str, Any], windows: tuple[int | None, ...]) -> DecoderConfig:
    """Qwen3's layers with these windows."""
    bias = bool(config.get("attention_bias", False))
    fields = {**common_fields(config), "windows": windows}
    return DecoderConfig(**fields, qkv_bias=bias, output_bias=bias, qk_norm=True)
