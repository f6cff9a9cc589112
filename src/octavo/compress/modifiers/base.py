"""What the block pipeline asks of a modifier, and what passes between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.schemes import SchemeGroup
from octavo.compress.statistics import InputStatistics


@dataclass
class LinearLayer:
    """A linear layer to be quantized: its full name, float32 weight [N, K], scheme and the dtype of its scales."""

    name: str
    weight: Tensor
    scheme: WeightScheme
    scale_dtype: torch.dtype
    observer: str | None = None


@dataclass
class LayerResult:
    """`codes` int8 [N, K] and `scale` float32 [N, G] of a layer, with what the report says about it.

    `error` is relative: the squared error of the layer's outputs on the calibration data, divided by the squared
    outputs; without calibration data the same of the weights.
    """

    name: str
    scheme: WeightScheme
    codes: Tensor
    scale: Tensor
    scale_dtype: torch.dtype
    error: float
    details: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Modifier(ABC):
    """One step of a recipe. The pipeline calls `claim` for every linear layer of the model, then `quantize` block by
    block, with statistics of the inputs where `statistics` is not "none"."""

    group_size: int | None = None  # asked for by the user; None: that of the scheme

    @property
    @abstractmethod
    def statistics(self) -> str:
        """What it needs to know of a layer's inputs: "none", "diagonal" or "hessian"."""

    @abstractmethod
    def claim(self, name: str, module: nn.Module) -> SchemeGroup | None:
        """The scheme that it has for a module, None if it leaves it alone."""

    @abstractmethod
    def unused_patterns(self, modules: dict[str, nn.Module]) -> list[str]:
        """Messages about targets and ignore strings that mean no module."""

    @abstractmethod
    def quantize(self, layers: list[LinearLayer], inputs: InputStatistics | None) -> list[LayerResult]:
        """Quantize layers that read the same inputs; `inputs` is None when they never ran in calibration."""

    @abstractmethod
    def to_recipe(self) -> dict[str, Any]:
        """Its arguments as they are written to recipe.yaml."""
