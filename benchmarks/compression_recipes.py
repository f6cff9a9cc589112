"""The recipes that the compression comparison runs: Octavo's and LLM Compressor's, under one name each.

A recipe is named METHOD-wBITS ("gptq-w4"), "w8a8", or "none". Every weight-only recipe is symmetric in groups of 64 and
leaves the output layer alone, so that what two tools write has the same size. Neither library is imported before a
recipe is built: each tool runs in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KEY = ("tool", "model", "recipe", "draw")  # what tells jobs and results apart
GROUP_SIZE = 64
IGNORE = ["lm_head"]
SMOOTHING = 0.8

# Recipe -> whether it looks at calibration text: one that doesn't is the same for every draw.
OCTAVO_RECIPES = {
    "rtn-w4": False, "rtn-w3": False,
    "rtn-imatrix-w4": True, "rtn-imatrix-w3": True,
    "gptq-w4": True, "gptq-w3": True,
    "awq-w4": True, "awq-w3": True,
    "awq-gptq-w4": True, "awq-gptq-w3": True,
    "w8a8": True,
}  # fmt: skip
PEER_RECIPES = {
    "rtn-w4": False, "rtn-w3": False,
    "rtn-mse-w4": False, "rtn-mse-w3": False,
    "rtn-imatrix-w4": True, "rtn-imatrix-w3": True,
    "gptq-w4": True, "gptq-w3": True,
    "gptq-imatrix-w4": True, "gptq-imatrix-w3": True,
    "awq-w4": True, "awq-w3": True,
    "w8a8": True,
}  # fmt: skip
RECIPES = {"octavo": OCTAVO_RECIPES, "peer": PEER_RECIPES}

# Octavo's recipe -> the peer's that it is held against; the first one is the row's opponent, by the rules the
# strongest of its kind.
OPPONENTS = {
    "rtn-w4": ("rtn-mse-w4", "rtn-w4"),
    "rtn-imatrix-w4": ("rtn-imatrix-w4",),
    "gptq-w4": ("gptq-imatrix-w4", "gptq-w4"),
    "awq-w4": ("awq-w4",),
    "awq-gptq-w4": ("gptq-imatrix-w4", "awq-w4"),
    "rtn-w3": ("rtn-mse-w3", "rtn-w3"),
    "rtn-imatrix-w3": ("rtn-imatrix-w3",),
    "gptq-w3": ("gptq-imatrix-w3", "gptq-w3"),
    "awq-w3": ("awq-w3",),
    "awq-gptq-w3": ("gptq-imatrix-w3", "awq-w3"),
    "w8a8": ("w8a8",),
}


def parse(recipe: str) -> tuple[str, int]:
    """Method and bits of a recipe's name: "gptq-imatrix-w3" -> ("gptq-imatrix", 3); ("w8a8", 8)."""
    if recipe == "w8a8":
        return recipe, 8
    method, _, bits = recipe.rpartition("-w")
    return method, int(bits)


def weights(bits: int, **more: Any) -> dict[str, Any]:
    """The weights' part of a scheme: symmetric integers, in groups of GROUP_SIZE, a scale a row for 8 bits."""
    shape = {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": GROUP_SIZE}
    return {"num_bits": bits, "type": "int", "symmetric": True, **shape, **more}


def octavo_recipe(recipe: str) -> list[Any]:
    """Octavo's modifiers, each with its own defaults."""
    from octavo import modifiers as m

    method, bits = parse(recipe)
    groups: dict[str, Any] = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights(bits)}},
        "ignore": IGNORE,
    }
    if method == "w8a8":
        return [m.SmoothQuantModifier(smoothing_strength=SMOOTHING), m.GPTQModifier(scheme="W8A8", ignore=IGNORE)]
    builders: dict[str, Callable[[], list[Any]]] = {
        "rtn": lambda: [m.QuantizationModifier(**groups)],
        "rtn-imatrix": lambda: [m.QuantizationModifier(**groups, weight_observer="imatrix_signed")],
        "gptq": lambda: [m.GPTQModifier(**groups)],
        "awq": lambda: [m.AWQModifier(), m.QuantizationModifier(**groups)],
        "awq-gptq": lambda: [m.AWQModifier(), m.GPTQModifier(**groups)],
    }
    return builders[method]()


def peer_recipe(recipe: str) -> list[Any]:
    """LLM Compressor's modifiers, each with its own defaults but for the observer that the name says."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    method, bits = parse(recipe)
    if method == "w8a8":
        return [
            SmoothQuantModifier(smoothing_strength=SMOOTHING),
            GPTQModifier(targets="Linear", scheme="W8A8", ignore=IGNORE),
        ]
    kind, _, observer = method.partition("-")
    more: dict[str, Any] = (
        {"observer": {"mse": "memoryless_mse", "imatrix": "imatrix_mse"}[observer]} if observer else {}
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights(bits, **more)))
    quantizer = GPTQModifier if kind == "gptq" else QuantizationModifier
    chain: list[Any] = [AWQModifier()] if kind == "awq" else []
    return [*chain, quantizer(config_groups={"group_0": scheme}, ignore=IGNORE)]
