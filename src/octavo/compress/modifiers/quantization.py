"""QuantizationModifier: round every weight to the nearest code (RTN)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.kv_scales import check_kv_cache_scheme
from octavo.compress.matching import check_all_match, matches_any
from octavo.compress.modifiers.base import LayerResult, LinearLayer, Quantizer
from octavo.compress.number_formats import FP8, integer
from octavo.compress.observers import USES_IMPORTANCE, choose_grid, observer, uses_hessian
from octavo.compress.rounding import Grid, ScaleKind, dequantize, global_scale, quantize
from octavo.compress.schemes import SchemeGroup, as_tuple, scheme_groups, with_group_size
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError


@dataclass(kw_only=True)
class QuantizationModifier(Quantizer):
    """Quantize the linear layers that `targets` name and `ignore` does not, each weight to its nearest code.

    `scheme` is a preset ("W4A16", "FP8_DYNAMIC", ...) or {preset: targets}; `config_groups` spells schemes out instead.
    `group_size` replaces the preset's. `weight_observer` chooses the scales: minmax, mse, signed (the default),
    imatrix_mse and imatrix_signed, which weigh errors by the inputs seen in calibration, and hessian_signed, which
    knows how the inputs go together. `kv_cache_scheme` stores scales for an FP8 KV cache as well, of the keys and
    values seen in calibration. The argument names are LLM Compressor's, except group_size.
    """

    targets: str | list[str] = "Linear"
    ignore: str | list[str] | None = None
    scheme: str | Mapping[str, Any] | None = None
    config_groups: Mapping[str, Any] | None = None
    group_size: int | None = None
    weight_observer: str | None = None
    observer: str | Mapping[str, str] | None = None
    kv_cache_scheme: Mapping[str, Any] | None = None

    default_observer = "signed"

    def __post_init__(self) -> None:
        if self.observer is not None and self.weight_observer is not None:
            raise UserError("give observer or weight_observer, not both")
        groups = scheme_groups(self.scheme, as_tuple(self.targets), self.config_groups)  # type: ignore[arg-type]
        if self.group_size is not None:
            groups = [SchemeGroup(g.targets, with_group_size(g.scheme, self.group_size), g.observer) for g in groups]
        self._groups = groups
        if self.kv_cache_scheme is not None:
            check_kv_cache_scheme(self.kv_cache_scheme)
        self._ignore = as_tuple(self.ignore)  # type: ignore[arg-type]
        for name in [self.observer_name(group.observer) for group in groups]:
            observer(name)

    def observer_name(self, of_group: str | None) -> str:
        given: Any = self.weight_observer or self.observer
        if isinstance(given, Mapping):
            unknown = set(given) - {"weights"}
            if unknown:
                raise UserError(f"observer has keys {sorted(unknown)}; only 'weights' is chosen by an observer")
            given = given.get("weights")
        return given or of_group or self.default_observer

    @property
    def statistics(self) -> frozenset[str]:
        used = [(self.observer_name(group.observer), group.scheme) for group in self._groups]
        kinds = {"diagonal"} if any(name in USES_IMPORTANCE for name, _ in used) else set()
        kinds |= {"hessian"} if any(uses_hessian(name, scheme) for name, scheme in used) else set()
        if any(_is_static(group.scheme) for group in self._groups):
            kinds.add("range")
        return frozenset(kinds)

    def claim(self, name: str, module: nn.Module) -> SchemeGroup | None:
        """The first group whose targets name the module, unless it is ignored."""
        if not isinstance(module, nn.Linear) or matches_any(self._ignore, name, module):
            return None
        for group in self._groups:
            if matches_any(group.targets, name, module):
                return group
        return None

    def unused_patterns(self, modules: dict[str, nn.Module]) -> list[str]:
        targets = [target for group in self._groups for target in group.targets]
        return check_all_match(targets, modules, "target") + check_all_match(self._ignore, modules, "ignore")

    def quantize(self, layers: list[LinearLayer], inputs: InputStatistics | None) -> list[LayerResult]:
        results = []
        for layer in layers:
            assert layer.scheme is not None
            alike = [other.weight for other in layers if other.scheme == layer.scheme]
            results.append(self._round(layer, inputs, global_scale(alike, layer.scheme)))
        return results

    def _round(self, layer: LinearLayer, inputs: InputStatistics | None, overall: float | None) -> LayerResult:
        name = self.observer_name(layer.observer)
        assert layer.scheme is not None
        importance = _importance(name, layer.scheme, inputs)
        grid = choose_grid(layer.weight, importance, layer.scheme, name, layer.scale_dtype, overall)
        codes = quantize(layer.weight, grid, layer.scheme)
        difference = dequantize(codes, grid, layer.scheme).sub_(layer.weight)
        error = float(_energy(difference, importance) / _energy(layer.weight, importance).clamp_min(1e-30))
        return self._layer_result(layer, codes, grid, error, {"algorithm": "rtn", "observer": name}, inputs)

    def _layer_result(
        self,
        layer: LinearLayer,
        codes: Tensor,
        grid: Grid,
        error: float,
        details: dict[str, Any],
        inputs: InputStatistics | None,
    ) -> LayerResult:
        assert layer.scheme is not None
        rows, columns = layer.weight.shape
        result = LayerResult(layer.name, (rows, columns), layer.scheme, codes, grid, layer.scale_dtype, error, details)
        if _is_static(layer.scheme):
            result.input_scale = _input_scale(result, inputs)
        return result


def _importance(name: str, scheme: WeightScheme, inputs: InputStatistics | None) -> Tensor | None:
    """What the observer `name` gets to know of the inputs, if any were seen: their squares [K] or X'X [K, K]."""
    if inputs is None or inputs.tokens == 0 or name not in USES_IMPORTANCE:
        return None
    return inputs.hessian() if uses_hessian(name, scheme) else inputs.diagonal()


def _energy(rows: Tensor, importance: Tensor | None) -> Tensor:
    """The sum of rows [N, K] squared, weighed by the squares of the inputs, or of the outputs if X'X is known."""
    if importance is None:
        return rows.square().sum()
    return torch.linalg.vecdot(rows @ importance if importance.dim() == 2 else rows * importance, rows).sum()


def _is_static(scheme: WeightScheme) -> bool:
    return scheme.activations is not None and not scheme.activations.dynamic


def _input_scale(result: LayerResult, inputs: InputStatistics | None) -> Tensor:
    """[1]: what makes the largest input that was seen the largest level; 1, and a note, where none was seen."""
    assert result.scheme is not None and result.scheme.activations is not None
    if inputs is None or inputs.tokens == 0:
        result.notes.append(f"{result.name}: it saw no calibration token, so the static scale of its input is 1")
        return torch.ones(1)
    peak = torch.maximum(-inputs.minimum().min(), inputs.maximum().max())
    levels = FP8.high if result.scheme.activations.type == "float" else integer(8).high
    return ScaleKind(result.scale_dtype).usable(peak.reshape(1) / levels)
