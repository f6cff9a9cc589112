"""What the blocks of the Llama family and its relatives are built from: `DecoderConfig`, and its common fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError
from octavo.layers.activation import GATED_ACTIVATIONS
from octavo.layers.experts import ExpertsConfig
from octavo.layers.latent_attention import LatentConfig
from octavo.layers.rotary import RopeConfig
from octavo.layers.weights import WeightSource

if TYPE_CHECKING:
    from octavo.models.decoder import DecoderLayer


@dataclass(frozen=True)
class LayerNames:
    """What a checkpoint calls the projections of a layer; projections that it keeps merged have one name."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, as its family's file reads it from a `config.json`.

    Attributes:
        windows: tokens that a query of each layer sees, itself included; None where it sees all.
        partial_rotary: the family can turn a part of each head only.
        local_rope: rotary settings of the layers that `local_layers` marks, where they differ from the others'.
        norm_offset: what every norm adds to its weight.
        softcap: attention scores s become softcap * tanh(s / softcap); `logits_softcap` likewise.
        rounds_multiplier: the embedding multiplier is rounded to the dtype of activations, as it was in training.
        block: builds the layers, where they are not `DecoderLayer`.
        refused: why no block computes such a model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope: RopeConfig
    eps: float
    activation: str
    windows: tuple[int | None, ...]
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    rounds_multiplier: bool = False
    norm_offset: float = 0.0
    softcap: float | None = None
    logits_softcap: float | None = None
    partial_rotary: bool = False
    local_rope: RopeConfig | None = None
    local_layers: tuple[bool, ...] = ()
    names: LayerNames = LayerNames()
    block: Callable[[int, DecoderConfig, WeightSource], DecoderLayer] | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    refused: str | None = None

    def unsupported_reason(self) -> str | None:
        """Why the blocks of this file cannot compute such a model, or None."""
        if self.refused is not None:
            return self.refused
        if self.activation not in GATED_ACTIVATIONS:
            return f"hidden_act {self.activation!r} is not one of {', '.join(GATED_ACTIVATIONS)}"
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} attention heads are not a multiple of {self.num_kv_heads} KV heads"
        if self.head_dim % 2:
            return f"the head size {self.head_dim} is odd"
        routing = None if self.experts is None else self.experts.routing.unsupported_reason()
        ropes = [self.rope] if self.local_rope is None else [self.rope, self.local_rope]
        reasons = [routing, *(rope.unsupported_reason() for rope in ropes)]
        if not self.partial_rotary:
            reasons += [
                f"its code turns whole heads, but partial_rotary_factor asks for {rope.rotary_dim} of {self.head_dim}"
                for rope in ropes
                if rope.rotary_dim != self.head_dim
            ]
        return next((reason for reason in reasons if reason), None)


def common_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of `DecoderConfig` that every family of this file reads the same way, with transformers' defaults."""
    heads = required(config, "num_attention_heads")
    hidden = required(config, "hidden_size")
    head_dim = config.get("head_dim") or hidden // heads
    max_position = required(config, "max_position_embeddings")
    layers = required(config, "num_hidden_layers")
    return {
        "vocab_size": required(config, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": required(config, "intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "max_position": max_position,
        "rope": RopeConfig.from_config(config, head_dim, max_position),
        "eps": float(config.get("rms_norm_eps", 1e-6)),
        "activation": config.get("hidden_act", "silu"),
        "windows": (None,) * layers,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def required(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise CheckpointError(
            f"config.json: {key} is {value!r}, but must be a positive number; the file is incomplete."
        )
    return value
