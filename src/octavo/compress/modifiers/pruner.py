"""What the pruning modifiers share: which layers, how sparse, in which structure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.matching import check_all_match, matches_any
from octavo.compress.modifiers.base import LinearLayer, PrunedLayer, Pruner
from octavo.compress.pruning import MaskStructure
from octavo.compress.schemes import as_tuple
from octavo.errors import UserError


@dataclass(kw_only=True)
class PruningModifier(Pruner):
    """Zeroes a share of the weights of the linear layers that `targets` name and `ignore` does not.

    `mask_structure` "0:0" lets zeros be anywhere, "2:4" makes 2 of every 4 neighbouring weights of a row zero. A
    structure has a sparsity of its own, N / M; else `sparsity` says it, for all blocks or for each in a list.
    """

    targets: str | Sequence[str] = "Linear"
    ignore: str | Sequence[str] | None = None
    sparsity: float | Sequence[float] | None = None
    mask_structure: str = "0:0"

    def __post_init__(self) -> None:
        self.structure = MaskStructure.parse(self.mask_structure)
        self._targets, self._ignore = as_tuple(self.targets), as_tuple(self.ignore)  # type: ignore[arg-type]
        self._check_sparsity()

    @property
    def given_sparsity(self) -> float | Sequence[float] | None:
        """The sparsity that was asked for."""
        return self.sparsity

    def _check_sparsity(self) -> None:
        given, own = self.given_sparsity, self.structure.zeros / max(self.structure.of, 1)
        values = [given] if given is None or isinstance(given, int | float) else list(given)
        if not self.structure.is_free:
            if any(value is not None and abs(value - own) > 1e-6 for value in values):
                raise UserError(
                    f"sparsity is {given}, but mask_structure {self.structure} makes it {own:g}; leave sparsity out",
                    param="sparsity",
                )
        elif not values or any(value is None or not 0 < value < 1 for value in values):
            raise UserError(
                f"sparsity is {given}; it must be above 0 and below 1, the share of weights that become zero, or a "
                "list of one a block",
                param="sparsity",
            )

    def sparsity_of(self, name: str) -> float:
        """The share of a layer's weights that becomes zero, by its full name."""
        if not self.structure.is_free:
            return self.structure.zeros / self.structure.of
        given = self.given_sparsity
        if isinstance(given, int | float):
            return float(given)
        shares = list(given or ())
        index = block_index(name)
        if index >= len(shares):
            raise UserError(
                f"sparsity has {len(shares)} values, one a block, but {name} is in block {index}", param="sparsity"
            )
        return float(shares[index])

    def claim(self, name: str, module: nn.Module) -> bool:
        """Whether `targets` name the module and `ignore` does not; UserError where the structure does not fit it."""
        if not isinstance(module, nn.Linear) or not matches_any(self._targets, name, module):
            return False
        if matches_any(self._ignore, name, module):
            return False
        if not self.structure.is_free and module.in_features % self.structure.of:
            raise UserError(
                f"{name} has {module.in_features} inputs, which {self.structure.of} of mask_structure "
                f"{self.structure} does not divide; ignore that layer, or use another structure",
                param="mask_structure",
            )
        return True

    def unused_patterns(self, modules: dict[str, nn.Module]) -> list[str]:
        return check_all_match(self._targets, modules, "target") + check_all_match(self._ignore, modules, "ignore")

    def result(
        self, layer: LinearLayer, weight: Tensor, mask: Tensor, error: float, algorithm: str, **details: Any
    ) -> PrunedLayer:
        """A layer's result, with the sparsity that was reached in its report."""
        reached = float(mask.float().mean())
        about = {"algorithm": algorithm, "sparsity": reached, "mask_structure": str(self.structure)}
        return PrunedLayer(layer.name, weight, mask, error, about | details)


def masked(layer: LinearLayer, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's weight with zeros where the mask, or the one it had, is true; and both masks in one."""
    mask = mask if layer.mask is None else mask | layer.mask
    return layer.weight.masked_fill(mask, 0.0), mask


def relative_error(before: Tensor, after: Tensor, importance: Tensor | None) -> float:
    """Squared change of a weight [N, K] over its square, each input weighed by `importance` [K] where that is known."""
    change, energy = (after - before).square(), before.square()
    if importance is not None:
        change, energy = change * importance, energy * importance
    return float(change.sum() / energy.sum().clamp_min(torch.finfo(torch.float32).tiny))


def block_index(name: str) -> int:
    """The number of the block that a layer is in: "model.layers.3.mlp.up_proj" -> 3."""
    match = re.search(r"\.(\d+)\.", name)
    if match is None:
        raise UserError(f"{name} is in no numbered block, so a sparsity for each block says nothing about it")
    return int(match[1])
