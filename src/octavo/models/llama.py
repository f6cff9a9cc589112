"""Llama, and what is Llama by configuration: SmolLM, Yi, Mistral (sliding window), Granite 3 and 4 (multipliers)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.models.decoder_config import DecoderConfig, LayerNames, common_fields, required
from octavo.models.layer_kinds import FULL, layer_kinds


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


def granite_hybrid_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a GraniteMoeHybridForCausalLM that is dense and attends in all layers (Granite 4).

    Its feed-forward has the name of what would be the shared expert. Without rotary embedding it is served as well.
    """
    inner = required({"shared_intermediate_size": 1024, **config}, "shared_intermediate_size")
    decoder = granite_config({**config, "intermediate_size": inner, "mlp_bias": False})
    rope = decoder.rope if config.get("position_embedding_type") == "rope" else replace(decoder.rope, rope_type="none")
    kinds = layer_kinds(config, decoder.num_layers, []) or config.get("layers_block_type") or ["mamba"]
    recurrent = set(kinds) - {"attention", FULL}
    refused = f"it has layers of the kinds {', '.join(sorted(recurrent))}" if recurrent else None
    if config.get("num_local_experts", 8):
        refused = "it routes tokens to experts (num_local_experts)"
    names = LayerNames(mlp="shared_mlp", gate_up=("input_linear",), down="output_linear")
    return replace(decoder, rope=rope, names=names, refused=refused)
