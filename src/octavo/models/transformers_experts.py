"""Mixtures on the generic route: transformers routes the tokens, and its fused experts are replaced by ours.

They stay quantized where the checkpoint (or `quantization`) has them so, and run in one grouped product on a GPU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from octavo import ops
from octavo.layers.activation import GATED_ACTIVATIONS, gated_activation
from octavo.layers.experts import ExpertNames, separate_experts
from octavo.layers.weights import WeightSource
from octavo.ops import PackedExperts

# Model types whose experts compute down(act(gate(x)) * up(x)) and are modules of their own in checkpoints; tests
# compare each with transformers' code.
SERVED = ("glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe")


class RoutedExperts(nn.Module):
    """Stands where transformers had its experts, and is called as they are."""

    def __init__(self, packed: PackedExperts) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows [T, H], the experts of each [T, K] and their weights [T, K] -> [T, H]."""
        return ops.experts(hidden_states, top_k_index, top_k_weights.float(), self.packed)


def load_experts(path: str, module: nn.Module, config: Any, source: WeightSource) -> RoutedExperts | None:
    """The experts that `module`, of this path in a model, holds in two tensors; None where it is nothing of the kind,
    or the checkpoint has no tensors of each expert."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    if config.model_type not in SERVED or shapes.keys() != {"gate_up_proj", "down_proj"}:
        return None
    names = ExpertNames(path.removesuffix(".experts"))
    if f"{path}.0.{names.gate}.weight" not in source.checkpoint or config.hidden_act not in GATED_ACTIVATIONS:
        return None
    count, hidden, inner = shapes["down_proj"]
    experts = separate_experts(source, names, count, hidden, inner)
    return RoutedExperts(
        ops.pack_experts(experts, gated_activation(config.hidden_act), source.dtype, source.device, False)
    )
