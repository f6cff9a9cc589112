"""The recipe objects, under LLM Compressor's class names, for `from octavo.modifiers import GPTQModifier`."""

from __future__ import annotations

from typing import Any

from octavo.compress.modifiers.gptq import GPTQModifier
from octavo.compress.modifiers.magnitude import ConstantPruningModifier, MagnitudePruningModifier
from octavo.compress.modifiers.quantization import QuantizationModifier
from octavo.compress.modifiers.quip import QuIPModifier
from octavo.compress.modifiers.sparsegpt import SparseGPTModifier
from octavo.compress.modifiers.spinquant import SpinQuantModifier
from octavo.compress.modifiers.wanda import WandaPruningModifier
from octavo.errors import UserError


class _NotYet:
    """A modifier that this version does not have; making one says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UserError(
            f"{type(self).__name__} is not there yet; GPTQModifier and QuantizationModifier are", param="recipe"
        )


class AWQModifier(_NotYet):
    """Activation-aware weight scaling: not there yet."""


class SmoothQuantModifier(_NotYet):
    """Moving activation outliers into the weights: not there yet."""


__all__ = [
    "AWQModifier",
    "ConstantPruningModifier",
    "GPTQModifier",
    "MagnitudePruningModifier",
    "QuIPModifier",
    "QuantizationModifier",
    "SmoothQuantModifier",
    "SparseGPTModifier",
    "SpinQuantModifier",
    "WandaPruningModifier",
]
