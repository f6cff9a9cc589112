"""Hands a stack of decoder layers to the operation that runs them all in one call, where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from octavo import ops
from octavo.ops.decoder import FusedDecoder

if TYPE_CHECKING:
    from octavo.models.decoder import DecoderLayer, GatedMLP, SelfAttention
    from octavo.models.decoder_config import DecoderConfig

FUSED_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def fuse_layers(layers: Sequence[DecoderLayer], config: DecoderConfig) -> FusedDecoder | None:
    """One function for all layers, or None where no kernel serves them and each operation is called by itself."""
    is_plain = config.block is None and config.local_rope is None and config.residual_multiplier == 1.0
    is_plain = is_plain and config.activation in FUSED_ACTIVATIONS
    if not is_plain or not all(layer.is_merged for layer in layers):
        return None
    return ops.fuse_decoder([_describe(layer, config) for layer in layers])


def _describe(layer: DecoderLayer, config: DecoderConfig) -> ops.DecoderLayer:
    attention, mlp = cast("SelfAttention", layer.attention), cast("GatedMLP", layer.mlp)  # a merged layer's are such
    return ops.DecoderLayer(
        qkv=attention.qkv.packed[0],
        output=attention.output.packed[0],
        gate_up=mlp.gate_up.packed[0],
        down=mlp.down.packed[0],
        input_norm=layer.input_norm.weight,
        post_norm=layer.post_norm.weight,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.eps,
        scale=attention.attend.scale,
        activation=FUSED_ACTIVATIONS[config.activation],
        window=attention.attend.window,
        softcap=attention.attend.softcap,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        head_eps=attention.eps,
        qkv_bias=attention.qkv.bias,
        output_bias=attention.output.bias,
        gate_up_bias=mlp.gate_up.bias,
        down_bias=mlp.down.bias,
    )
