"""Gemma 2: norms before and after both halves of a block, soft caps, and windows in every other layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.layers.step import StepInputs
from octavo.layers.weights import WeightSource
from octavo.models.decoder import DecoderLayer, load_norm
from octavo.models.decoder_config import DecoderConfig, common_fields, required
from octavo.models.layer_kinds import FULL, SLIDING, every_nth_full, layer_kinds

GELU = "gelu_pytorch_tanh"


class SandwichLayer(DecoderLayer):
    """Norm, attention, norm; norm, feed-forward, norm: what each half adds to the residual is normalized too."""

    def __init__(self, index: int, config: DecoderConfig, source: WeightSource) -> None:
        super().__init__(index, config, source)
        prefix = f"model.layers.{index}"
        self.mlp_input_norm = load_norm(source, f"{prefix}.pre_feedforward_layernorm", config)
        self.mlp_output_norm = load_norm(source, f"{prefix}.post_feedforward_layernorm", config)

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cos_sin: Tensor, step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = x
            x = self.input_norm(x)
        else:
            x = self.input_norm(x, residual)
        x = self.post_norm(self.attention(x, positions, cos_sin, step))
        x = self.mlp_input_norm(x, residual)
        return self.mlp_output_norm(self.mlp(x)), residual


def gemma2_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a Gemma2ForCausalLM."""
    given = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}
    layers = required(config, "num_hidden_layers")
    kinds = layer_kinds(config, layers, every_nth_full(layers, 2))
    return gemma_decoder(given, kinds, given["attn_logit_softcapping"])


def gemma_decoder(config: dict[str, Any], kinds: list[str], softcap: float | None = None, **more: Any) -> DecoderConfig:
    """What the generations with four norms a block share."""
    activation = config.get("hidden_activation") or GELU
    defaults = {"head_dim": 256, "tie_word_embeddings": True}
    fields = common_fields({**defaults, **config, "hidden_act": activation})
    bias = bool(config.get("attention_bias", False))
    window = config.get("sliding_window", 4096)
    unknown = set(kinds) - {SLIDING, FULL}
    refused = f"layers of the kinds {', '.join(sorted(unknown))} are not served" if unknown else None
    if config.get("use_bidirectional_attention"):
        refused = "its attention is not causal (use_bidirectional_attention)"
    fields["windows"] = tuple(window if kind == SLIDING else None for kind in kinds)
    return DecoderConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        embedding_multiplier=fields["hidden_size"] ** 0.5,
        rounds_multiplier=True,
        norm_offset=1.0,
        softcap=softcap,
        logits_softcap=config.get("final_logit_softcapping"),
        block=SandwichLayer,
        refused=refused,
        **more,
    )
