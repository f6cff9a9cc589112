"""SparseGPTModifier: drop weights one column after the other, later columns make good for the error so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.compress.gptq_solver import inverse_factor
from octavo.compress.modifiers.base import LinearLayer, PrunedLayer
from octavo.compress.modifiers.owl import OWLModifier
from octavo.compress.modifiers.pruner import masked, relative_error
from octavo.compress.pruning import magnitude_mask, sparsegpt, wanda_mask
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError


@dataclass(kw_only=True)
class SparseGPTModifier(OWLModifier):
    """SparseGPT, with LLM Compressor's argument names.

    `dampening_frac` of the Hessian's mean diagonal is added to it; ten and a hundred times that are tried when it is
    not positive definite. After that Wanda's choice is made, without an input the magnitude's, which the report says.
    `preserve_sparsity_mask` keeps zeros that the weight has already; they count.
    """

    block_size: int = 128
    dampening_frac: float = 0.01
    preserve_sparsity_mask: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1:
            raise UserError(f"block_size is {self.block_size}; it must be at least 1", param="block_size")
        if not 0 < self.dampening_frac < 1:
            raise UserError(f"dampening_frac is {self.dampening_frac}; it must be above 0 and below 1; 0.01 is usual")

    @property
    def statistics(self) -> frozenset[str]:
        return frozenset({"hessian"})

    def prune(self, layers: list[LinearLayer], inputs: InputStatistics | None) -> list[PrunedLayer]:
        if inputs is None or inputs.tokens == 0:
            why = "it saw no calibration token" if inputs is None else "no calibration token was finite"
            return [self._without_hessian(layer, None, why) for layer in layers]
        hessian = inputs.hessian()
        as_they_are = torch.arange(len(hessian), device=hessian.device)
        factor, damping = inverse_factor(hessian, as_they_are, self.dampening_frac)
        if factor is None or damping is None:
            why = "its Hessian is not positive definite at any damping tried"
            return [self._without_hessian(layer, inputs.diagonal(), why) for layer in layers]
        return [self._solve(layer, hessian, factor, damping) for layer in layers]

    def _solve(self, layer: LinearLayer, hessian: torch.Tensor, factor: torch.Tensor, damping: float) -> PrunedLayer:
        diagonal = hessian.diagonal()
        before = layer.weight if layer.mask is None else layer.weight.masked_fill(layer.mask, 0.0)
        keeps = self.preserve_sparsity_mask or layer.mask is not None
        sparsity = self.sparsity_of(layer.name)
        weight, mask, damped = sparsegpt(
            before, factor, diagonal == 0, sparsity, self.structure, self.block_size, preserve=keeps
        )
        # The column errors squared sum up to the quadratic form of the damped Hessian; the damping's part is taken off.
        change = (weight - before).square().sum()
        error = (damped.sum() - change * (damping * diagonal.mean())).clamp_min(0)
        energy = torch.linalg.vecdot(before @ hessian, before).sum().clamp_min(1e-30)
        dead = int((diagonal == 0).sum())
        return self.result(
            layer, weight, mask, float(error / energy), "sparsegpt", damping=damping, dead_inputs=dead
        )  # fmt: skip

    def _without_hessian(self, layer: LinearLayer, squares: torch.Tensor | None, why: str) -> PrunedLayer:
        sparsity, keeps = self.sparsity_of(layer.name), self.preserve_sparsity_mask
        if squares is None:
            mask, what = magnitude_mask(layer.weight, sparsity, self.structure, keeps), "magnitude"
        else:
            mask, what = wanda_mask(layer.weight, squares, sparsity, self.structure, keeps), "wanda"
        weight, mask = masked(layer, mask)
        error = relative_error(layer.weight, weight, squares)
        pruned = self.result(layer, weight, mask, error, what, fallback=why)
        pruned.notes.append(f"{layer.name}: pruned by {what} instead of SparseGPT: {why}")
        return pruned
