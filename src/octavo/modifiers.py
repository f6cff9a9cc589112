"""The recipe objects, under LLM Compressor's class names, for `from octavo.modifiers import GPTQModifier`."""

from __future__ import annotations

from octavo.compress.modifiers.awq import AWQModifier
from octavo.compress.modifiers.gptq import GPTQModifier
from octavo.compress.modifiers.magnitude import ConstantPruningModifier, MagnitudePruningModifier
from octavo.compress.modifiers.quantization import QuantizationModifier
from octavo.compress.modifiers.quip import QuIPModifier
from octavo.compress.modifiers.smoothquant import LogarithmicEqualizationModifier, SmoothQuantModifier
from octavo.compress.modifiers.sparsegpt import SparseGPTModifier
from octavo.compress.modifiers.spinquant import SpinQuantModifier
from octavo.compress.modifiers.wanda import WandaPruningModifier

__all__ = [
    "AWQModifier",
    "ConstantPruningModifier",
    "GPTQModifier",
    "LogarithmicEqualizationModifier",
    "MagnitudePruningModifier",
    "QuIPModifier",
    "QuantizationModifier",
    "SmoothQuantModifier",
    "SparseGPTModifier",
    "SpinQuantModifier",
    "WandaPruningModifier",
]
