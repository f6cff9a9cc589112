"""Sparsity by block: OWL (Yin et al., "Outlier Weighed Layerwise Sparsity", 2023) prunes blocks with outliers less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from octavo.compress.modifiers.pruner import PruningModifier, block_index
from octavo.errors import UserError


@dataclass(kw_only=True)
class OWLModifier(PruningModifier):
    """A pruner that may give each block a sparsity of its own.

    With `sparsity_profile` "owl" the whole model is run once before anything is pruned. A block's outliers are the
    scores, |weight| times its input's norm, above `owl_m` times the layer's mean; blocks get sparsities within
    `owl_lmbda` of the mean `sparsity`, the fewer the more outliers they have.
    """

    sparsity_profile: str | None = None
    owl_m: float = 5.0
    owl_lmbda: float = 0.08

    def __post_init__(self) -> None:
        super().__post_init__()
        self._by_block: dict[int, float] = {}
        if self.sparsity_profile not in (None, "owl"):
            raise UserError(
                f"sparsity_profile is {self.sparsity_profile!r}; it must be 'owl' or None", param="sparsity_profile"
            )
        if not self.has_profile:
            return
        given = self.given_sparsity
        if not self.structure.is_free or not isinstance(given, int | float):
            raise UserError(
                "sparsity_profile 'owl' shares one sparsity out over the blocks, so it needs a single sparsity and "
                "mask_structure '0:0'",
                param="sparsity_profile",
            )
        if self.owl_m <= 0 or not 0 < self.owl_lmbda < min(given, 1 - given):
            raise UserError(
                f"owl_m is {self.owl_m} and owl_lmbda {self.owl_lmbda}; both must be above 0 and owl_lmbda below "
                f"{min(given, 1 - given):g}, so that each block's sparsity stays between 0 and 1",
                param="owl_lmbda",
            )

    @property
    def has_profile(self) -> bool:
        """Whether `set_outliers` must be called before the first layer is pruned."""
        return self.sparsity_profile is not None

    def set_outliers(self, ratios: Mapping[int, float]) -> None:
        """Take the share of outliers in each block."""
        self._by_block = owl_sparsities(ratios, float(self.given_sparsity), self.owl_lmbda)  # type: ignore[arg-type]

    def sparsity_of(self, name: str) -> float:
        """The share of a layer's weights that becomes zero, by its full name."""
        return self._by_block[block_index(name)] if self.has_profile else super().sparsity_of(name)


def outliers(weight: Tensor, squares: Tensor, threshold: float) -> int:
    """How many of a layer's scores |weight| * input norm are above `threshold` times their mean; `squares` [K]."""
    scores = weight.abs() * squares.sqrt()
    return int((scores > threshold * scores.mean()).sum())


def owl_sparsities(ratios: Mapping[int, float], sparsity: float, spread: float) -> dict[int, float]:
    """Sparsities by block, `sparsity` on average and at most 2 * `spread` apart, falling as the ratio rises."""
    low, high = min(ratios.values()), max(ratios.values())
    scaled = {block: (ratio - low) / max(high - low, 1e-12) * 2 * spread for block, ratio in ratios.items()}
    mean = sum(scaled.values()) / len(scaled)
    return {block: sparsity - (value - mean) for block, value in scaled.items()}
