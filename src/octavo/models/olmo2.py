"""OLMo 2: norms after attention and feed-forward instead of before, and over all query and all key heads at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.step import StepInputs
from octavo.layers.weights import WeightSource
from octavo.models.decoder import DecoderLayer, SelfAttention, feed_forward, load_norm
from octavo.models.decoder_config import DecoderConfig, common_fields


class WholeNormAttention(SelfAttention):
    """Attention whose queries are normalized as one row of all heads, and its keys likewise."""

    def __init__(self, index: int, config: DecoderConfig, source: WeightSource, prefix: str) -> None:
        super().__init__(index, config, source, prefix)
        self.sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.whole_norms = [
            source.tensor(f"{prefix}.{part}_norm.weight", (size,)) for part, size in zip("qk", self.sizes, strict=False)
        ]
        self.deterministic = source.deterministic

    def __call__(self, x: Tensor, positions: Tensor, cos_sin: Tensor, step: StepInputs) -> Tensor:
        *rows, v = self.qkv(x).split(self.sizes, dim=1)
        q, k = (
            ops.rms_norm(row.contiguous(), weight, self.eps, deterministic=self.deterministic)
            for row, weight in zip(rows, self.whole_norms, strict=True)
        )
        return self.output(self.attend(torch.cat((q, k, v), dim=1), positions, cos_sin, step))


class PostNormLayer(DecoderLayer):
    """Attention, norm, feed-forward, norm: both halves read the residual as it is."""

    def __init__(self, index: int, config: DecoderConfig, source: WeightSource) -> None:
        prefix = f"model.layers.{index}"
        self.attention = WholeNormAttention(index, config, source, f"{prefix}.self_attn")
        self.post_norm = load_norm(source, f"{prefix}.post_attention_layernorm", config)
        self.mlp = feed_forward(index, config, source, prefix)
        self.mlp_output_norm = load_norm(source, f"{prefix}.post_feedforward_layernorm", config)

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cos_sin: Tensor, step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else residual + x
        residual = residual + self.post_norm(self.attention(residual, positions, cos_sin, step))
        return self.mlp_output_norm(self.mlp(residual)), residual


def olmo2_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of an Olmo2ForCausalLM."""
    bias = bool(config.get("attention_bias", False))
    fields = common_fields({"rms_norm_eps": 1e-5, **config})
    return DecoderConfig(**fields, qkv_bias=bias, output_bias=bias, block=PostNormLayer)
