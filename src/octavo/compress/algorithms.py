"""The algorithms by name: steps joined by "+", such as "gptq" or "smoothquant+gptq"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.compress.modifiers.awq import AWQModifier
from octavo.compress.modifiers.base import Modifier
from octavo.compress.modifiers.gptq import GPTQModifier
from octavo.compress.modifiers.quantization import QuantizationModifier
from octavo.compress.modifiers.smoothquant import SmoothQuantModifier
from octavo.compress.modifiers.sparsegpt import SparseGPTModifier
from octavo.compress.modifiers.spinquant import SpinQuantModifier
from octavo.compress.modifiers.wanda import WandaPruningModifier
from octavo.errors import UserError

QUANTIZERS = ("rtn", "gptq")

# A step's modifier from the quantizer's arguments (scheme, ignore, group_size, ...), of which it takes what it needs.
STEPS: dict[str, Callable[[Mapping[str, Any]], Modifier]] = {
    "rtn": lambda quantizer: QuantizationModifier(**quantizer),
    "gptq": lambda quantizer: GPTQModifier(**quantizer),
    "awq": lambda quantizer: AWQModifier(),
    "smoothquant": lambda quantizer: SmoothQuantModifier(),
    "spinquant": lambda quantizer: SpinQuantModifier(),
    "sparsegpt": lambda quantizer: SparseGPTModifier(**_half_pruned(quantizer)),
    "wanda": lambda quantizer: WandaPruningModifier(**_half_pruned(quantizer)),
}


def _half_pruned(quantizer: Mapping[str, Any]) -> dict[str, Any]:
    """Two weights of every four go, the form that hardware knows; a recipe says anything else."""
    return {"sparsity": 0.5, "mask_structure": "2:4", "ignore": quantizer["ignore"]}


def algorithm_chain(name: str) -> list[str]:
    """The steps of an algorithm. A chain without a quantizer ("awq") ends in rounding; UserError for unknown steps."""
    steps = [step.strip().lower() for step in name.split("+")]
    unknown = [step for step in steps if step not in STEPS]
    if unknown:
        raise UserError(
            f"algorithm {name!r}: unknown step {unknown[0]!r}; known are {', '.join(STEPS)}, joined by + as in "
            "smoothquant+gptq",
            param="algorithm",
        )
    if not any(step in QUANTIZERS for step in steps):
        steps.append("rtn")
    if [step in QUANTIZERS for step in steps].index(True) != len(steps) - 1:
        raise UserError(
            f"algorithm {name!r}: one step quantizes ({' or '.join(QUANTIZERS)}), and it is the last", param="algorithm"
        )
    return steps
