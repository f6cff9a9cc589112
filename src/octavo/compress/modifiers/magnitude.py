"""Pruning without calibration: the smallest weights of a layer, or the zeros that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from octavo.compress.matching import check_all_match, matches_any
from octavo.compress.modifiers.base import LinearLayer, PrunedLayer, Pruner
from octavo.compress.modifiers.pruner import PruningModifier, masked, relative_error
from octavo.compress.pruning import magnitude_mask
from octavo.compress.schemes import as_tuple
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError


@dataclass(kw_only=True)
class MagnitudePruningModifier(PruningModifier):
    """Drops the smallest weights of each layer.

    `final_sparsity` is LLM Compressor's name for `sparsity`. Its `init_sparsity` starts a schedule over training steps;
    there are none here, so it may only be 0 or the final one.
    """

    final_sparsity: float | None = None
    init_sparsity: float | None = None

    def __post_init__(self) -> None:
        if self.sparsity is not None and self.final_sparsity is not None:
            raise UserError("give sparsity or final_sparsity, not both: they mean the same", param="sparsity")
        if self.init_sparsity not in (None, 0, self.final_sparsity):
            raise UserError(
                f"init_sparsity is {self.init_sparsity}: it starts a schedule over training steps, and pruning here is "
                "one step, to final_sparsity; leave it out",
                param="init_sparsity",
            )
        super().__post_init__()

    @property
    def given_sparsity(self) -> float | Sequence[float] | None:
        """The sparsity that was asked for, under either name."""
        return self.sparsity if self.final_sparsity is None else self.final_sparsity

    @property
    def statistics(self) -> frozenset[str]:
        return frozenset()

    def prune(self, layers: list[LinearLayer], inputs: InputStatistics | None) -> list[PrunedLayer]:
        pruned = []
        for layer in layers:
            keeps = layer.mask is not None
            mask = magnitude_mask(layer.weight, self.sparsity_of(layer.name), self.structure, keeps)
            weight, mask = masked(layer, mask)
            error = relative_error(layer.weight, weight, None)
            pruned.append(self.result(layer, weight, mask, error, "magnitude"))
        return pruned


@dataclass(kw_only=True)
class ConstantPruningModifier(Pruner):
    """Keeps the zeros that layers have: a quantizer after it leaves them exactly zero."""

    targets: str | Sequence[str] = "Linear"
    ignore: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._targets, self._ignore = as_tuple(self.targets), as_tuple(self.ignore)  # type: ignore[arg-type]

    def claim(self, name: str, module: nn.Module) -> bool:
        """Whether `targets` name the module and `ignore` does not."""
        wanted = isinstance(module, nn.Linear) and matches_any(self._targets, name, module)
        return wanted and not matches_any(self._ignore, name, module)

    def unused_patterns(self, modules: dict[str, nn.Module]) -> list[str]:
        return check_all_match(self._targets, modules, "target") + check_all_match(self._ignore, modules, "ignore")

    @property
    def statistics(self) -> frozenset[str]:
        return frozenset()

    def prune(self, layers: list[LinearLayer], inputs: InputStatistics | None) -> list[PrunedLayer]:
        pruned = []
        for layer in layers:
            mask = layer.weight == 0
            details = {"algorithm": "constant", "sparsity": float(mask.float().mean())}
            pruned.append(PrunedLayer(layer.name, layer.weight, mask, 0.0, details))
        return pruned
