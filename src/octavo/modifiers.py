"""The recipe objects, under LLM Compressor's class names, for `from octavo.modifiers import GPTQModifier`."""

from __future__ import annotations

from typing import Any

from octavo.compress.modifiers.gptq import GPTQModifier
from octavo.compress.modifiers.quantization import QuantizationModifier
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


class SparseGPTModifier(_NotYet):
    """Pruning with GPTQ's compensation: not there yet."""


class WandaPruningModifier(_NotYet):
    """Pruning by weight and activation: not there yet."""


class QuIPModifier(_NotYet):
    """Hadamard rotations of single layers: not there yet."""


class SpinQuantModifier(_NotYet):
    """Hadamard rotations of the whole model: not there yet."""


__all__ = [
    "AWQModifier",
    "GPTQModifier",
    "QuIPModifier",
    "QuantizationModifier",
    "SmoothQuantModifier",
    "SparseGPTModifier",
    "SpinQuantModifier",
    "WandaPruningModifier",
]
