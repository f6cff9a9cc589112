"""WandaPruningModifier: drop the weights that are small beside the size of their input."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.compress.modifiers.base import LinearLayer, PrunedLayer
from octavo.compress.modifiers.owl import OWLModifier
from octavo.compress.modifiers.pruner import masked, relative_error
from octavo.compress.pruning import magnitude_mask, wanda_mask
from octavo.compress.statistics import InputStatistics


@dataclass(kw_only=True)
class WandaPruningModifier(OWLModifier):
    """Wanda, with LLM Compressor's argument names: in each row the smallest of |weight| times its input's norm.

    The other weights stay as they are. A layer that no token reached is pruned by magnitude, which the report says.
    `preserve_sparsity_mask` keeps zeros that the weight has already; they count.
    """

    preserve_sparsity_mask: bool = False

    @property
    def statistics(self) -> frozenset[str]:
        return frozenset({"diagonal"})

    def prune(self, layers: list[LinearLayer], inputs: InputStatistics | None) -> list[PrunedLayer]:
        squares = None if inputs is None or inputs.tokens == 0 else inputs.diagonal()
        pruned = []
        for layer in layers:
            sparsity = self.sparsity_of(layer.name)
            keeps = self.preserve_sparsity_mask or layer.mask is not None
            if squares is None:
                mask = magnitude_mask(layer.weight, sparsity, self.structure, keeps)
            else:
                mask = wanda_mask(layer.weight, squares, sparsity, self.structure, keeps)
            weight, mask = masked(layer, mask)
            error = relative_error(layer.weight, weight, squares)
            pruned.append(self.result(layer, weight, mask, error, "magnitude" if squares is None else "wanda"))
            if squares is None:
                pruned[-1].notes.append(f"{layer.name}: pruned by magnitude instead of Wanda: no token reached it")
        return pruned
