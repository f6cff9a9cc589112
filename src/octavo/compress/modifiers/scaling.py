"""What SmoothQuant and AWQ have in common: they divide the channels of one layer and multiply those of the next."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.blocks import Blocks
from octavo.compress.layer_work import all_finite
from octavo.compress.mappings import BlockCheck, Smoothing, find_smoothings, norm_offset
from octavo.compress.matching import check_all_match, matches, matches_any
from octavo.compress.modifiers.base import Transform
from octavo.compress.schemes import as_tuple
from octavo.compress.simulation import FutureLayer, simulated
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError

_SAME, _SAME_16_BITS = 1e-2, 5e-2  # changes of a block's output that are rounding, in float32 and in shorter dtypes


@dataclass(kw_only=True)
class ScalingTransform(Transform):
    """Finds in every block what can share factors; the subclass says which factors.

    `mappings` names them instead, in either of LLM Compressor's forms: pairs [balance layers, smooth layer] or mappings
    with the keys smooth_layer and balance_layers, all strings as in targets. Layers that `ignore` names keep their
    weights. What reads the same channels as a layer that is named is always changed with it.
    """

    mappings: Sequence[Any] | None = None
    ignore: str | list[str] | None = None

    calibrated = True
    verified = False  # whether factors are kept only where they help the block as a whole

    def __post_init__(self) -> None:
        self._patterns = None if self.mappings is None else [_pattern(mapping) for mapping in self.mappings]
        self._ignored = as_tuple(self.ignore)  # type: ignore[arg-type]
        self._after: Mapping[str, Any] = {}
        self._prefix = ""
        self._smoothings: list[list[Smoothing]] = []
        self._check = BlockCheck()

    @property
    @abstractmethod
    def kinds(self) -> frozenset[str]:
        """The InputStatistics that the factors depend on."""

    @abstractmethod
    def factors(self, smoothing: Smoothing, layers: list[FutureLayer], inputs: InputStatistics) -> Tensor | None:
        """Factors [K], the same for channels that are shared; None to leave things as they are, NaN if none are finite.

        `layers` are those readers that will be quantized, or all linear ones where nothing will be.
        """

    def follow(self, layers: Mapping[str, Any]) -> None:
        self._after = {name: assignment for name, assignment in layers.items() if assignment.scheme is not None}

    def unused_patterns(self, modules: dict[str, nn.Module]) -> list[str]:
        named = [name for pattern in self._patterns or () for name in (pattern[0], *pattern[1])]
        return check_all_match(named, modules, "mapping") + check_all_match(self._ignored, modules, "ignore")

    def prepare(self, model: Any, blocks: Blocks) -> list[str]:
        self._prefix = blocks.prefix
        self._smoothings = []
        for index, block in enumerate(blocks.modules):
            self._smoothings.append([
                smoothing for smoothing in self._wanted(block, blocks.name(index), model.config)
                if self._is_useful(smoothing, block, blocks.name(index))
            ])  # fmt: skip
        if not any(self._smoothings):
            raise UserError(
                f"{type(self).__name__}: {type(model).__name__} has no layers that can share factors"
                f"{' as mappings names them' if self._patterns else ''}; leave it out of the recipe",
                param="recipe",
            )
        return self._missing(blocks)

    def _wanted(self, block: nn.Module, name: str, config: Any) -> list[Smoothing]:
        found = find_smoothings(block, config)
        if self._patterns is not None:
            found = list(_named(self._patterns, block, name, found))
        return [smoothing for smoothing in found if not self._is_ignored(smoothing, block, name)]

    def _is_ignored(self, smoothing: Smoothing, block: nn.Module, name: str) -> bool:
        parts = [smoothing.smooth, *smoothing.layers(block)]
        return any(matches_any(self._ignored, f"{name}.{part}", block.get_submodule(part)) for part in parts)

    def _is_useful(self, smoothing: Smoothing, block: nn.Module, name: str) -> bool:
        layers = smoothing.layers(block)
        return bool(layers) and (not self._after or any(f"{name}.{layer}" in self._after for layer in layers))

    def _missing(self, blocks: Blocks) -> list[str]:
        """A note about the quantized layers whose inputs stay as they are."""
        if self._patterns is not None or self._ignored:
            return []
        left: dict[str, int] = {}
        for index, block in enumerate(blocks.modules):
            reached = {layer for smoothing in self._smoothings[index] for layer in smoothing.layers(block)}
            for full, _ in blocks.linears(index):
                relative = full.removeprefix(f"{blocks.name(index)}.")
                if full in self._after and relative not in reached:
                    left[relative] = left.get(relative, 0) + 1
        return [
            f"{type(self).__name__}: the inputs of {name} stay as they are in {count} blocks, for no layer makes them "
            "that could be scaled exactly"
            for name, count in left.items()
        ]

    def read(self, module: nn.Module, name: str) -> None:
        if name and self._smoothings[int(name.rpartition(".")[2])]:
            self._check.attach(module)

    def watch(self, index: int) -> dict[str, frozenset[str]]:
        return {f"{self._prefix}.{index}.{smoothing.input}": self.kinds for smoothing in self._smoothings[index]}

    def apply(self, index: int, block: nn.Module, inputs: dict[str, InputStatistics]) -> list[str]:
        name = f"{self._prefix}.{index}"
        self._check.begin(block)
        notes = []
        scaled: list[tuple[Smoothing, InputStatistics, Tensor | None]] = []
        for smoothing in self._smoothings[index]:
            seen = inputs.get(f"{name}.{smoothing.input}")
            problem: str | None
            if seen is None or seen.tokens == 0:
                factors, problem = None, f"no {'' if seen is None else 'finite '}calibration token reached its readers"
            else:
                factors, problem = self._scale(smoothing, block, name, seen)
                scaled.append((smoothing, seen, factors))
            if problem is not None:
                notes.append(f"{type(self).__name__}: {name}.{smoothing.smooth} is not scaled: {problem}")
        self._check.detach()
        for smoothing, seen, factors in scaled:
            self.finish(block, self._future(smoothing, block, name), seen, factors)
        return notes

    def _scale(
        self, smoothing: Smoothing, block: nn.Module, name: str, inputs: InputStatistics
    ) -> tuple[Tensor | None, str | None]:
        """Scale one pair: the factors that were applied, if any; and why it is not scaled, if there is a problem."""
        layers = self._future(smoothing, block, name)
        if not all(all_finite(layer.weight) for layer in layers.values()):
            return None, "weights that read it are not finite"
        factors = self.factors(smoothing, list(layers.values()), inputs)
        if factors is None:
            return None, None
        if not bool(torch.isfinite(factors).all()):
            return None, "its inputs gave no finite factors"
        if self.verified and self._is_worse(block, layers, inputs, factors):
            return None, "the quantized block would be worse"
        return self._apply(smoothing, block, factors)

    def _is_worse(
        self, block: nn.Module, layers: dict[str, FutureLayer], inputs: InputStatistics, factors: Tensor
    ) -> bool:
        """Whether the output of the block, these layers quantized, is further off with the factors than without.

        What comes after a layer (a norm, for instance) may weigh its errors differently than the search did.
        """
        errors = []
        for tried in (torch.ones_like(factors), factors):
            with simulated(block, layers, inputs.diagonal(), tried):
                errors.append(self._check.difference(block))
        return errors[1] > errors[0]

    def _apply(self, smoothing: Smoothing, block: nn.Module, factors: Tensor) -> tuple[Tensor | None, str | None]:
        """The factors that were applied; taken back, with the reason, where the block computes something else now."""
        used = smoothing.apply(block, factors)
        change = self._check.difference(block)
        weight = block.get_parameter(smoothing.readers[0])
        if change <= (_SAME if weight.dtype == torch.float32 else _SAME_16_BITS):
            return used, None
        smoothing.apply(block, 1 / used)
        return None, f"the block would compute something else (its output changed by {100 * change:.2g} %)"

    def finish(
        self, block: nn.Module, layers: dict[str, FutureLayer], inputs: InputStatistics, factors: Tensor | None
    ) -> None:
        """Change the readers of a pair further, once all are scaled; its inputs were divided by `factors`, if any."""

    def _future(self, smoothing: Smoothing, block: nn.Module, name: str) -> dict[str, FutureLayer]:
        """The readers that will be quantized, by name within the block; all linear ones where nothing will be."""
        found = {}
        for layer, module in smoothing.layers(block).items():
            after = self._after.get(f"{name}.{layer}")
            if after is not None:
                observer = after.quantizer.observer_name(after.observer)
                found[layer] = FutureLayer(module.weight.detach().float(), after.scheme, observer)
            elif not self._after:
                found[layer] = FutureLayer(module.weight.detach().float(), None, "")
        return found


def _pattern(mapping: Any) -> tuple[str, tuple[str, ...]]:
    """Smooth layer and balance layers of a mapping in either form."""
    if isinstance(mapping, Mapping):
        smooth, balance = mapping.get("smooth_layer"), mapping.get("balance_layers")
        known = set(mapping) == {"smooth_layer", "balance_layers"}
    elif isinstance(mapping, Sequence) and not isinstance(mapping, str) and len(mapping) == 2:
        balance, smooth = mapping
        known = True
    else:
        known, smooth, balance = False, None, None
    balance = (balance,) if isinstance(balance, str) else tuple(balance or ())
    if not known or not isinstance(smooth, str) or not balance or not all(isinstance(name, str) for name in balance):
        raise UserError(
            f"mappings: {mapping!r} is not understood; give [[balance layers], smooth layer], or smooth_layer and "
            "balance_layers",
            param="mappings",
        )
    return smooth, balance


def _named(
    patterns: Sequence[tuple[str, tuple[str, ...]]], block: nn.Module, name: str, found: Sequence[Smoothing]
) -> Iterator[Smoothing]:
    """Those of `found` that are named, and a pair of what is named where nothing like it was found."""
    modules = [(relative, module) for relative, module in block.named_modules() if relative]
    for smooth_pattern, balance in patterns:
        for smooth, module in modules:
            if not matches(smooth_pattern, f"{name}.{smooth}", module):
                continue
            known = [smoothing for smoothing in found if smoothing.smooth == smooth]
            layers = [
                relative for relative, other in modules
                if isinstance(other, nn.Linear) and matches_any(balance, f"{name}.{relative}", other)
            ]  # fmt: skip
            if known:
                yield from known
            elif layers and _fits(module, block.get_submodule(layers[0])):
                yield Smoothing(smooth, tuple(f"{layer}.weight" for layer in layers), layers[0])


def _fits(smooth: nn.Module, reader: nn.Module) -> bool:
    if isinstance(smooth, nn.Linear):
        return smooth.out_features == reader.in_features
    return norm_offset(smooth) is not None
