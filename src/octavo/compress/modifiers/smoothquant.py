"""SmoothQuantModifier: move the outliers of activations into weights, where they do less harm."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.compress.mappings import Smoothing
from octavo.compress.modifiers.scaling import ScalingTransform
from octavo.compress.simulation import FutureLayer, output_error
from octavo.compress.smoothing import log_equalization_factors, smoothquant_factors
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError

ALGORITHMS = ("smoothquant", "log_equalization")
_USUAL_STRENGTH = 0.5
# What the search tries: the best on real models had the root mean square and 0.5 to 0.7 nearly everywhere.
_TYPICAL_STRENGTHS, _RANGE_STRENGTHS = (0.4, 0.5, 0.6, 0.7, 0.8), (0.5, 0.8)


@dataclass(kw_only=True)
class SmoothQuantModifier(ScalingTransform):
    """SmoothQuant (Xiao et al., 2022), with LLM Compressor's argument names.

    `smoothing_strength` between 0 and 1 uses its formula, with the range of the activations. "auto", the default, tries
    several strengths, with the range and with the root mean square of the activations, and takes what gives the least
    error of the quantized layers on some calibration tokens, weights and activations rounded; nothing if that is the
    best, or if the block as a whole would be worse. `algorithm` "log_equalization" has one formula and takes no
    strength. Besides the norms, values and the projections up are smoothed, which is exact.
    """

    smoothing_strength: float | str = "auto"
    algorithm: str = "smoothquant"
    num_calibration_steps: int | None = None
    calibration_function: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm not in ALGORITHMS:
            raise UserError(f"algorithm is {self.algorithm!r}; it must be one of {', '.join(ALGORITHMS)}")
        strength = self.smoothing_strength
        if strength != "auto" and not (isinstance(strength, int | float) and 0 <= strength <= 1):
            raise UserError(
                f"smoothing_strength is {strength!r}; it must be between 0 and 1, or 'auto'", param="smoothing_strength"
            )
        if self.num_calibration_steps is not None or self.calibration_function is not None:
            raise UserError(
                "num_calibration_steps and calibration_function are not there: calibration runs all sequences through "
                "each block; set num_calibration_samples of oneshot instead"
            )

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(("range", "diagonal", "rows") if self._is_searched() else ("range",))

    @property
    def verified(self) -> bool:  # type: ignore[override]
        return self._is_searched()

    def _is_searched(self) -> bool:
        return self.algorithm == "smoothquant" and self.smoothing_strength == "auto" and bool(self._after)

    def factors(self, smoothing: Smoothing, layers: list[FutureLayer], inputs: InputStatistics) -> Tensor | None:
        spread = smoothing.shared(inputs.maximum() - inputs.minimum(), largest=True)
        if self.algorithm == "log_equalization":
            return log_equalization_factors(spread)
        weights = [layer.weight for layer in layers]
        if not self._is_searched():
            strength = _USUAL_STRENGTH if self.smoothing_strength == "auto" else float(self.smoothing_strength)
            return smoothing.shared(smoothquant_factors(spread, weights, strength), largest=True)
        return _best_factors(smoothing, layers, inputs, spread)


def _best_factors(
    smoothing: Smoothing, layers: list[FutureLayer], inputs: InputStatistics, spread: Tensor
) -> Tensor | None:
    """Of several strengths, the factors with the least error on the rows that were kept; None if ones are best."""
    importance, rows = inputs.diagonal(), inputs.rows()
    typical = smoothing.shared(importance / inputs.tokens).sqrt()
    weights = [layer.weight for layer in layers]
    layers = [_quick(layer.sampled()) for layer in layers]
    outputs = [rows @ layer.weight.t() for layer in layers]
    best, best_error = None, output_error(layers, rows, outputs, importance, torch.ones_like(spread))
    tried = [(typical, strength) for strength in _TYPICAL_STRENGTHS]
    tried += [(spread, strength) for strength in _RANGE_STRENGTHS]
    for peaks, strength in tried:
        factors = smoothing.shared(smoothquant_factors(peaks, weights, strength), largest=True)
        error = output_error(layers, rows, outputs, importance, factors)
        if error < best_error:
            best, best_error = factors, error
    return best if math.isfinite(best_error) else torch.full_like(spread, torch.nan)


def _quick(layer: FutureLayer) -> FutureLayer:
    """With minmax instead of an observer that searches: with 8 bits they hardly differ, next to the activations."""
    return replace(layer, observer="minmax") if layer.scheme is not None and layer.scheme.num_bits >= 8 else layer


@dataclass(kw_only=True)
class LogarithmicEqualizationModifier(SmoothQuantModifier):
    """SmoothQuantModifier with algorithm "log_equalization"."""

    algorithm: str = "log_equalization"
