"""QuantizationModifier: round every weight to the nearest code (RTN)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from octavo.compress.matching import check_all_match, matches_any
from octavo.compress.modifiers.base import LayerResult, LinearLayer, Modifier
from octavo.compress.observers import USES_IMPORTANCE, choose_scales, observer
from octavo.compress.rounding import dequantize, quantize
from octavo.compress.schemes import SchemeGroup, as_tuple, scheme_groups, with_group_size
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError


@dataclass(kw_only=True)
class QuantizationModifier(Modifier):
    """Quantize the linear layers that `targets` name and `ignore` does not, each weight to its nearest code.

    `scheme` is a preset ("W4A16", "W8A16", "W8A8") or {preset: targets}; `config_groups` spells schemes out instead.
    `group_size` replaces the preset's. `weight_observer` chooses the scales: minmax, mse, signed (the default), and
    imatrix_mse and imatrix_signed, which weigh errors by the inputs seen in calibration. The argument names are LLM
    Compressor's, except group_size.
    """

    targets: str | list[str] = "Linear"
    ignore: str | list[str] | None = None
    scheme: str | Mapping[str, Any] | None = None
    config_groups: Mapping[str, Any] | None = None
    group_size: int | None = None
    weight_observer: str | None = None
    observer: str | Mapping[str, str] | None = None

    default_observer = "signed"

    def __post_init__(self) -> None:
        if self.observer is not None and self.weight_observer is not None:
            raise UserError("give observer or weight_observer, not both")
        groups = scheme_groups(self.scheme, as_tuple(self.targets), self.config_groups)  # type: ignore[arg-type]
        if self.group_size is not None:
            groups = [SchemeGroup(g.targets, with_group_size(g.scheme, self.group_size), g.observer) for g in groups]
        self._groups = groups
        self._ignore = as_tuple(self.ignore)  # type: ignore[arg-type]
        for name in [self._observer_name(group.observer) for group in groups]:
            observer(name)

    def _observer_name(self, of_group: str | None) -> str:
        given: Any = self.weight_observer or self.observer
        if isinstance(given, Mapping):
            unknown = set(given) - {"weights"}
            if unknown:
                raise UserError(f"observers for {sorted(unknown)} are not there yet; only weights have one")
            given = given.get("weights")
        return given or of_group or self.default_observer

    @property
    def statistics(self) -> str:
        used = [self._observer_name(group.observer) for group in self._groups]
        return "diagonal" if any(name in USES_IMPORTANCE for name in used) else "none"

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
        return [self._round(layer, inputs) for layer in layers]

    def _round(self, layer: LinearLayer, inputs: InputStatistics | None) -> LayerResult:
        importance = inputs.diagonal() if inputs is not None and self.statistics != "none" else None
        name = self._observer_name(layer.observer)
        scale = choose_scales(layer.weight, importance, layer.scheme, name, layer.scale_dtype)
        codes = quantize(layer.weight, scale, layer.scheme.num_bits)
        difference = dequantize(codes, scale).sub_(layer.weight).square_()
        energy = layer.weight.square()
        if importance is not None:
            difference, energy = difference * importance, energy * importance
        error = float(difference.sum() / energy.sum().clamp_min(1e-30))
        details = {"algorithm": "rtn", "observer": name}
        return LayerResult(layer.name, layer.scheme, codes, scale, layer.scale_dtype, error, details)

    def to_recipe(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
