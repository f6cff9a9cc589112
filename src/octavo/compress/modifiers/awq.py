"""AWQModifier: scale the channels of weights by what their inputs are like, so that rounding hurts less."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.clipping import clipped
from octavo.compress.mappings import Smoothing
from octavo.compress.modifiers.base import Modifier
from octavo.compress.modifiers.quantization import QuantizationModifier
from octavo.compress.modifiers.scaling import ScalingTransform
from octavo.compress.rounding import group_width
from octavo.compress.simulation import FutureLayer, weight_error
from octavo.compress.smoothing import awq_candidates, relative_magnitudes
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError

_QUANTIZATION = ("scheme", "config_groups", "targets", "group_size", "weight_observer")
_NOT_CLIPPED = ("q_proj", "k_proj")  # attention is too sensitive to the products of the two, as AWQ's authors found


@dataclass(kw_only=True)
class AWQModifier(ScalingTransform):
    """AWQ (Lin et al., 2023), with LLM Compressor's argument names; a quantizer follows it.

    For each pair of layers, `n_grid` candidates are tried and the one with the least error of the layers' outputs is
    taken. The error is computed from the inputs' second moments, tr((W' - W) X'X (W' - W)'), which is exact for all
    calibration tokens without running anything again, with the rounding of the quantizer that follows. `duo_scaling`:
    candidates from inputs and weights (True), from inputs alone (False), or half of each ("both", the default).
    `clip` looks for groups whose largest weights are better cut off, after scaling; None, the default, does so unless
    the quantizer that follows chooses scales or codes by the whole Hessian, for then it has no use for that.

    With a `scheme` or `config_groups` (and `targets`, `ignore`, `group_size`, `weight_observer`), as in older recipes,
    it is the pair of AWQModifier and QuantizationModifier.
    """

    duo_scaling: bool | str = "both"
    n_grid: int = 20
    clip: bool | None = None
    scheme: str | Mapping[str, Any] | None = None
    config_groups: Mapping[str, Any] | None = None
    targets: str | list[str] | None = None
    group_size: int | None = None
    weight_observer: str | None = None
    offload_device: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.duo_scaling not in (True, False, "both"):
            raise UserError(f"duo_scaling is {self.duo_scaling!r}; it must be true, false or 'both'", param="recipe")
        if not isinstance(self.n_grid, int) or self.n_grid < 2:
            raise UserError(f"n_grid is {self.n_grid!r}; it must be a whole number of at least 2", param="recipe")
        if self.offload_device is not None:
            raise UserError("offload_device is not there: AWQ keeps no outputs of whole modules; leave it out")
        quantizes = self.scheme is not None or self.config_groups is not None
        given = [name for name in _QUANTIZATION if getattr(self, name) is not None]
        if given and not quantizes:
            raise UserError(
                f"AWQModifier: {given[0]} goes with scheme or config_groups, or with the quantizer after it"
            )

    def expanded(self) -> list[Modifier]:
        given = {name: getattr(self, name) for name in _QUANTIZATION if getattr(self, name) is not None}
        if not given:
            return [self]
        given = {"weight_observer": "hessian_signed", **given, "ignore": self.ignore}
        alone = AWQModifier(mappings=self.mappings, duo_scaling=self.duo_scaling, n_grid=self.n_grid, clip=self.clip)
        return [alone, QuantizationModifier(**given)]

    def _clips_before_rounding(self) -> bool:
        return not any("hessian" in assignment.quantizer.statistics for assignment in self._after.values())

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(("hessian", "absmean"))

    def factors(self, smoothing: Smoothing, layers: list[FutureLayer], inputs: InputStatistics) -> Tensor | None:
        hessian, scheme = inputs.hessian(), layers[0].scheme
        assert scheme is not None  # a quantizer follows
        width = group_width(scheme, len(hessian))
        width = len(hessian) if len(hessian) % width else width  # blocks of a weight need not fit
        magnitudes = smoothing.shared(inputs.absmean())
        weights = smoothing.shared(relative_magnitudes([layer.weight for layer in layers], width))
        layers = [layer.sampled() for layer in layers]
        candidates = awq_candidates(magnitudes, weights, self.n_grid, self.duo_scaling)
        errors = [weight_error(layers, hessian, factors) for factors in candidates]
        best = min(range(len(errors)), key=lambda index: errors[index] if math.isfinite(errors[index]) else math.inf)
        if not math.isfinite(errors[best]):
            return torch.full_like(magnitudes, torch.nan)
        return candidates[best] if best else None

    def finish(
        self, block: nn.Module, layers: dict[str, FutureLayer], inputs: InputStatistics, factors: Tensor | None
    ) -> None:
        if not (self._clips_before_rounding() if self.clip is None else self.clip):
            return
        hessian = inputs.hessian() if factors is None else inputs.hessian() / factors.outer(factors)
        for name, layer in layers.items():
            if name.rpartition(".")[2] not in _NOT_CLIPPED:
                weight: Any = block.get_submodule(name).weight
                weight.data.copy_(clipped(layer, hessian))
