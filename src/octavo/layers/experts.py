"""Mixtures of experts (Shazeer et al., 2017): a router sends each token through a few of many feed-forward networks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.activation import gated_activation
from octavo.layers.layer import Block
from octavo.layers.linear import merge_parts
from octavo.layers.weights import WeightSource


@dataclass(frozen=True)
class Routing:
    """How a token chooses its experts and weighs them.

    Attributes:
        num_experts: experts to choose from, in `num_groups` groups of neighbours.
        top_k: experts that a token takes.
        scoring: "softmax" over all experts or "sigmoid" of each.
        normalizes: whether the weights of a token's experts are divided by their sum.
        scaling: what multiplies the weights in the end.
        top_groups: groups that a token may take experts of, those with the best `group_score`.
        group_score: a group's score is that of its "largest" expert, or the sum of its "two largest".
        has_bias: whether a bias an expert is added to the scores that choose, not to those that weigh (Wang et al.,
            2024, balancing without an auxiliary loss).
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    normalizes: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "largest"
    has_bias: bool = False

    def unsupported_reason(self) -> str | None:
        """Why tokens cannot be routed so, or None."""
        if not 1 <= self.top_k <= self.num_experts:
            return f"{self.top_k} experts a token is not between 1 and the number of experts, {self.num_experts}"
        if self.num_experts % self.num_groups:
            return f"{self.num_experts} experts do not make {self.num_groups} equal groups"
        group = self.num_experts // self.num_groups
        if self.group_score == "two largest" and group < 2 and self.num_groups > 1:
            return f"groups of {group} expert have no two largest scores"
        if not 1 <= self.top_groups <= self.num_groups or self.top_k > self.top_groups * group:
            return f"{self.top_k} experts a token out of {self.top_groups} of {self.num_groups} groups of {group}"
        return None


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of a model: which layers have one, the size of an expert, and of the shared one (0: none)."""

    routing: Routing
    intermediate_size: int
    layers: tuple[bool, ...]
    shared_size: int = 0


@dataclass(frozen=True)
class ExpertNames:
    """Where a checkpoint keeps a mixture: the module, and the names of gate, up and down inside an expert."""

    module: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class Router(Block):
    """Scores the experts of each token in float32, since a rounded score may choose another expert."""

    def __init__(self, routing: Routing, hidden: int, source: WeightSource, module: str) -> None:
        self.routing = routing
        weight = source.tensor(f"{module}.weight", (routing.num_experts, hidden), torch.float32)
        self.weight = ops.pack_weight(weight, torch.float32, source.device, source.deterministic)
        bias = f"{module}.e_score_correction_bias"
        self.bias = source.tensor(bias, (routing.num_experts,), torch.float32) if routing.has_bias else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, H] -> the experts of each, int64 [T, top_k], and their weights, float32 [T, top_k]."""
        routing = self.routing
        logits = ops.linear(x.float(), self.weight)
        scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(dim=-1)
        choice = scores if self.bias is None else scores + self.bias
        if routing.num_groups > 1:
            choice = self._within_groups(choice)
        ids = choice.topk(routing.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if routing.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        return ids, weights * routing.scaling

    def _within_groups(self, choice: Tensor) -> Tensor:
        """Scores with those outside of a token's best groups taken out (DeepSeek-V2, section 2.2.2)."""
        routing = self.routing
        grouped = choice.unflatten(1, (routing.num_groups, -1))
        best = grouped.topk(2 if routing.group_score == "two largest" else 1, dim=-1).values.sum(dim=-1)
        chosen = best.topk(routing.top_groups, dim=-1).indices
        is_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        return grouped.masked_fill(is_out[:, :, None], float("-inf")).flatten(1)


class Experts(Block):
    """The routed part: `sum_k weight_k * down_k(activation(gate_k(x)) * up_k(x))` over a token's experts."""

    def __init__(
        self, config: ExpertsConfig, hidden: int, activation: str, source: WeightSource, names: ExpertNames
    ) -> None:
        self.router = Router(config.routing, hidden, source, f"{names.module}.gate")
        count, inner = config.routing.num_experts, config.intermediate_size
        # Quantized experts are modules of their own; made-up checkpoints have transformers' names besides.
        quantized = source.checkpoint.stored_bits(f"{names.module}.experts.0.{names.gate}") is not None
        if not quantized and f"{names.module}.experts.gate_up_proj" in source.checkpoint:
            experts = stacked_experts(source, f"{names.module}.experts", count, hidden, inner)
        else:
            experts = separate_experts(source, names, count, hidden, inner)
        self.packed = ops.pack_experts(
            experts, gated_activation(activation), source.dtype, source.device, source.deterministic
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Rows [T, H] -> [T, H]."""
        return ops.experts(x, *self.router(x), self.packed)


def separate_experts(
    source: WeightSource, names: ExpertNames, count: int, hidden: int, inner: int
) -> Iterator[ops.Expert]:
    """Experts that are modules of their own, one after the other."""
    for index in range(count):
        module = f"{names.module}.experts.{index}"
        parts = [source.weight(f"{module}.{part}", (inner, hidden)) for part in (names.gate, names.up)]
        yield merge_parts(parts), source.weight(f"{module}.{names.down}", (hidden, inner))


def stacked_experts(source: WeightSource, module: str, count: int, hidden: int, inner: int) -> Iterator[ops.Expert]:
    """Experts in two tensors [E, 2 I, H] and [E, H, I], as transformers 5 keeps them in memory."""
    gate_up = source.tensor(f"{module}.gate_up_proj", (count, 2 * inner, hidden))
    down = source.tensor(f"{module}.down_proj", (count, hidden, inner))
    for index in range(count):
        yield [source.quantized(gate_up[index])], source.quantized(down[index])
