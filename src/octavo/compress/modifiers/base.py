"""What the block pipeline asks of a modifier, and what passes between them.

A recipe is a chain of three kinds, applied to each block in this order: transforms change weights without changing what
the model computes, pruners set weights of linear layers to zero, quantizers give linear layers their codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.blocks import Blocks
from octavo.compress.rounding import Grid
from octavo.compress.schemes import SchemeGroup
from octavo.compress.statistics import InputStatistics


@dataclass
class LinearLayer:
    """A linear layer in work: full name, float32 weight [N, K] and what it is to become.

    `scheme` is None where nothing quantizes it; scales are stored in `scale_dtype`. `mask` bool [N, K] marks weights
    that were pruned and stay zero.
    """

    name: str
    weight: Tensor
    scheme: WeightScheme | None
    scale_dtype: torch.dtype
    observer: str | None = None
    mask: Tensor | None = None


@dataclass
class PrunedLayer:
    """A layer after pruning: the float32 weight [N, K], its zeros as `mask`, and what the report says about it.

    `error` is relative, as in LayerResult.
    """

    name: str
    weight: Tensor
    mask: Tensor
    error: float
    details: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class LayerResult:
    """What became of a layer: `codes` [N, K] with their `grid` if it was quantized, and what the report says about it.

    `error` is relative: the squared error of the layer's outputs on the calibration data, divided by the squared
    outputs; without calibration data the same of the weights. `input_scale` [1] is that of static activations.
    """

    name: str
    shape: tuple[int, int]
    scheme: WeightScheme | None
    codes: Tensor | None
    grid: Grid | None
    scale_dtype: torch.dtype
    error: float
    details: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    input_scale: Tensor | None = None


class Modifier(ABC):
    """One step of a recipe; a dataclass whose fields are the recipe's arguments."""

    def to_recipe(self) -> dict[str, Any]:
        """Its arguments as they are written to recipe.yaml."""
        settings = fields(self)  # type: ignore[arg-type]
        return {f.name: getattr(self, f.name) for f in settings if getattr(self, f.name) != f.default}

    def expanded(self) -> list[Modifier]:
        """The modifiers that it stands for in a recipe."""
        return [self]

    @abstractmethod
    def unused_patterns(self, modules: dict[str, nn.Module]) -> list[str]:
        """Messages about targets and ignore strings that mean no module."""


class Transform(Modifier):
    """Changes weights so that the model computes the same, and quantizes better."""

    calibrated = False  # whether it looks at inputs, as `watch` says
    unties_embeddings = False  # whether the output layer gets a weight of its own

    def follow(self, layers: Mapping[str, Any]) -> None:
        """Told before `prepare` what happens to the linear layers afterwards: Assignments by full name."""

    @abstractmethod
    def prepare(self, model: Any, blocks: Blocks) -> list[str]:
        """Look at the model, which may be empty, before anything is read; notes for the report.

        UnsupportedModelError, with the reason, for a model that it would change in what it computes.
        """

    def read(self, module: nn.Module, name: str) -> None:
        """`module` was just given its weights: change in place what needs no data.

        `name` is a block's full name, or "" for everything outside the blocks (embeddings, last norm, output layer).
        """

    def watch(self, index: int) -> dict[str, frozenset[str]]:
        """Linear layers of block `index`, by full name, whose inputs it needs to know, and which InputStatistics."""
        return {}

    def apply(self, index: int, block: nn.Module, inputs: dict[str, InputStatistics]) -> list[str]:
        """Change the weights of block `index` in place by what was seen; notes. Called where `watch` asks for any."""
        return []

    def online(self) -> dict[str, Any]:
        """What is left to do whenever the model runs: config_groups of compressed-tensors' transform_config."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What is stored for that beside the model's own tensors."""
        return {}


class LayerModifier(Modifier):
    """Works on one linear layer at a time, or on some that read the same input."""

    @property
    @abstractmethod
    def statistics(self) -> frozenset[str]:
        """What it needs to know of a layer's inputs: kinds of InputStatistics."""


class Pruner(LayerModifier):
    """Sets weights to zero."""

    @abstractmethod
    def claim(self, name: str, module: nn.Module) -> bool:
        """Whether it prunes a module."""

    @abstractmethod
    def prune(self, layers: list[LinearLayer], inputs: InputStatistics | None) -> list[PrunedLayer]:
        """Prune layers that read the same inputs; `inputs` is None when they never ran in calibration."""


class Quantizer(LayerModifier):
    """Gives weights their codes."""

    group_size: int | None = None  # asked for by the user; None: that of the scheme
    kv_cache_scheme: Mapping[str, Any] | None = None  # of the scales of an FP8 KV cache; None: none

    @abstractmethod
    def claim(self, name: str, module: nn.Module) -> SchemeGroup | None:
        """The scheme that it has for a module, None if it leaves it alone."""

    @abstractmethod
    def observer_name(self, of_group: str | None) -> str:
        """The observer of a layer whose config group asks for `of_group` (None: for none in particular)."""

    @abstractmethod
    def quantize(self, layers: list[LinearLayer], inputs: InputStatistics | None) -> list[LayerResult]:
        """Quantize layers that read the same inputs; `inputs` is None when they never ran in calibration."""
