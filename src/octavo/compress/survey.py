"""A look at the whole model before any of it is pruned: how many outliers each block has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.assignment import Assignment, Plan
from octavo.compress.blocks import Blocks
from octavo.compress.model_source import ModelSource
from octavo.compress.modifiers.base import LinearLayer, PrunedLayer, Pruner
from octavo.compress.modifiers.owl import OWLModifier, outliers
from octavo.compress.modifiers.pruner import block_index
from octavo.compress.pipeline import BlockPipeline
from octavo.compress.statistics import InputStatistics


def survey(source: ModelSource, blocks: Blocks, plan: Plan, batches: list[Tensor]) -> list[str]:
    """Run the unpruned model once for each pruner of `plan` with a sparsity profile, and give it its blocks' outliers.

    Returns what the report says about it.
    """
    owners = [pruner for assignment in plan.layers.values() for pruner in assignment.pruners]
    notes = []
    for owner in {id(owner): owner for owner in owners}.values():
        if isinstance(owner, OWLModifier) and owner.has_profile:
            counts = _Counts(owner.owl_m)
            layers = {name: Assignment((counts,)) for name, a in plan.layers.items() if owner in a.pruners}
            BlockPipeline(source, blocks, Plan(layers), batches).run(None, lambda done, note: None)
            owner.set_outliers(counts.ratios())
            shares = [owner.sparsity_of(f"{blocks.name(index)}.") for index in sorted(counts.ratios())]
            notes.append(f"owl: sparsities by block {', '.join(f'{share:.3f}' for share in shares)}")
    return notes


class _Counts(Pruner):
    """Goes through the model as a pruner does, prunes nothing, and counts."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.found: dict[int, int] = {}
        self.weights: dict[int, int] = {}

    @property
    def statistics(self) -> frozenset[str]:
        return frozenset({"diagonal"})

    def claim(self, name: str, module: nn.Module) -> bool:
        return True

    def unused_patterns(self, modules: dict[str, Any]) -> list[str]:
        return []

    def prune(self, layers: list[LinearLayer], inputs: InputStatistics | None) -> list[PrunedLayer]:
        for layer in layers:
            block = block_index(layer.name)
            if inputs is not None and inputs.tokens:
                count = outliers(layer.weight, inputs.diagonal(), self.threshold)
                self.found[block] = self.found.get(block, 0) + count
            self.weights[block] = self.weights.get(block, 0) + layer.weight.numel()
        return [PrunedLayer(layer.name, layer.weight, torch.zeros_like(layer.weight, dtype=torch.bool), 0.0)
                for layer in layers]  # fmt: skip

    def ratios(self) -> dict[int, float]:
        """Outliers of each block in its weights."""
        return {block: self.found.get(block, 0) / count for block, count in self.weights.items()}
