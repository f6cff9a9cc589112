"""Gated activations of feed-forward blocks: activation(gate) * up on rows that hold both halves."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from octavo import ops

_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": ops.silu_mul,
    "swish": ops.silu_mul,
    "gelu_pytorch_tanh": ops.gelu_tanh_mul,
}

GATED_ACTIVATIONS = tuple(_GATED)


def gated_activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function [T, 2I] -> [T, I] for Hugging Face's `hidden_act` (one of `GATED_ACTIVATIONS`)."""
    return _GATED[name]
