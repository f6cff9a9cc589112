"""Llama, and what is Llama by configuration: SmolLM, Yi, Mistral (sliding window), Granite (multipliers)."""

from __future__ import annotations

from typing import Any

from octavo.models.decoder import DecoderConfig, common_fields


def llama_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a LlamaForCausalLM. One flag gives all four attention projections a bias."""
    bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        **common_fields(config), qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.get("mlp_bias", False))
    )


def mistral_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a MistralForCausalLM: no biases, and one window for all layers."""
    fields = common_fields(config)
    fields["windows"] = (config.get("sliding_window"),) * fields["num_layers"]
    return DecoderConfig(**fields)


def granite_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a GraniteForCausalLM: Llama with four multipliers."""
    bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        **common_fields(config),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        attention_scale=float(config.get("attention_multiplier", 1.0)),
        embedding_multiplier=float(config.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(config.get("residual_multiplier", 1.0)),
        logits_divisor=float(config.get("logits_scaling", 1.0)),
    )
