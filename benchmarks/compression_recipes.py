"""The recipes that the compression comparison runs: Octavo's and LLM Compressor's, under one name each.

A recipe is named METHOD-wBITS ("gptq-w4"), "w8a8", "w8a8-gptq" (without smoothing), or "none". Every weight-only recipe
is symmetric in groups of 64 and leaves the output layer alone, so that what two tools write has the same size. Neither
library is imported before a recipe is built: each tool runs in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KEY = ("tool", "model", "recipe", "draw")  # what tells jobs and results apart
GROUP_SIZE = 64
IGNORE = ["lm_head"]
SMOOTHING = 0.8  # the peer's, as in all of its int8 examples
GEMMA_SMOOTHING = [
    (["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"),
    (["re:.*gate_proj", "re:.*up_proj"], "re:.*pre_feedforward_layernorm"),
]

# Recipe -> how many draws of calibration windows it is run on: 0 for one that doesn't look at any, so is run once and
# stands for every draw; 1 for what is only shown beside the recipes that count.
OCTAVO_RECIPES = {
    "rtn-w4": 0, "rtn-w3": 0,
    "rtn-mse-w4": 0, "rtn-mse-w3": 0,
    "rtn-imatrix-w4": 1, "rtn-imatrix-w3": 1,
    "rtn-hessian-w4": 3, "rtn-hessian-w3": 3,
    "gptq-w4": 3, "gptq-w3": 3,
    "gptq-noalign-w4": 1, "gptq-noalign-w3": 1,
    "awq-w4": 3, "awq-w3": 3,
    "awq-gptq-w4": 1, "awq-gptq-w3": 1,
    "w8a8": 3, "w8a8-gptq": 1,
}  # fmt: skip
PEER_RECIPES = {
    "rtn-w4": 0, "rtn-w3": 0,
    "rtn-mse-w4": 0, "rtn-mse-w3": 0,
    "rtn-imatrix-w4": 3, "rtn-imatrix-w3": 3,
    "gptq-w4": 1, "gptq-w3": 1,
    "gptq-imatrix-w4": 3, "gptq-imatrix-w3": 3,
    "awq-w4": 1, "awq-w3": 1,
    "awq-imatrix-w4": 3, "awq-imatrix-w3": 3,
    "w8a8": 3, "w8a8-imatrix": 1, "w8a8-gptq": 3,
}  # fmt: skip
RECIPES = {"octavo": OCTAVO_RECIPES, "peer": PEER_RECIPES}

# Octavo's recipe -> the peer's that it is held against; the first one is the row's opponent, by the rules the
# strongest of its kind.
OPPONENTS = {
    "rtn-w4": ("rtn-mse-w4", "rtn-w4"),
    "rtn-mse-w4": ("rtn-mse-w4",),
    "rtn-hessian-w4": ("rtn-imatrix-w4",),
    "rtn-imatrix-w4": ("rtn-imatrix-w4",),
    "gptq-w4": ("gptq-imatrix-w4", "gptq-w4"),
    "gptq-noalign-w4": ("gptq-imatrix-w4",),
    "awq-w4": ("awq-imatrix-w4", "awq-w4"),
    "awq-gptq-w4": ("gptq-imatrix-w4",),
    "rtn-w3": ("rtn-mse-w3", "rtn-w3"),
    "rtn-mse-w3": ("rtn-mse-w3",),
    "rtn-hessian-w3": ("rtn-imatrix-w3",),
    "rtn-imatrix-w3": ("rtn-imatrix-w3",),
    "gptq-w3": ("gptq-imatrix-w3", "gptq-w3"),
    "gptq-noalign-w3": ("gptq-imatrix-w3",),
    "awq-w3": ("awq-imatrix-w3", "awq-w3"),
    "awq-gptq-w3": ("gptq-imatrix-w3",),
    "w8a8": ("w8a8", "w8a8-imatrix", "w8a8-gptq"),
    "w8a8-gptq": ("w8a8-gptq",),
}


def parse(recipe: str) -> tuple[str, int]:
    """Method and bits of a recipe's name: "gptq-imatrix-w3" -> ("gptq-imatrix", 3); ("w8a8", 8)."""
    if recipe.startswith("w8a8"):
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
    if bits == 8:
        chain = [m.SmoothQuantModifier()] if method == "w8a8" else []
        return [*chain, m.GPTQModifier(scheme="W8A8", ignore=IGNORE)]
    builders: dict[str, Callable[[], list[Any]]] = {
        "rtn": lambda: [m.QuantizationModifier(**groups)],
        "rtn-mse": lambda: [m.QuantizationModifier(**groups, weight_observer="mse")],
        "rtn-imatrix": lambda: [m.QuantizationModifier(**groups, weight_observer="imatrix_signed")],
        "rtn-hessian": lambda: [m.QuantizationModifier(**groups, weight_observer="hessian_signed")],
        "gptq": lambda: [m.GPTQModifier(**groups)],
        "gptq-noalign": lambda: [m.GPTQModifier(**groups, align=False)],
        "awq": lambda: [m.AWQModifier(), m.QuantizationModifier(**groups, weight_observer="hessian_signed")],
        "awq-gptq": lambda: [m.AWQModifier(), m.GPTQModifier(**groups)],
    }
    return builders[method]()


def peer_recipe(recipe: str, model_type: str) -> list[Any]:
    """LLM Compressor's modifiers, each with its own defaults but for the observer that the name says.

    SmoothQuant is told which norm is before Gemma 3's feed-forward layers: as released it divides the one behind its
    attention, which changes what the model computes.
    """
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    method, bits = parse(recipe)
    if bits == 8:
        mappings = GEMMA_SMOOTHING if model_type.startswith("gemma") else None
        smooth = [SmoothQuantModifier(smoothing_strength=SMOOTHING, mappings=mappings)]
        observed = {"observer": {"weights": "imatrix_mse"}} if method == "w8a8-imatrix" else {}
        quantizer = GPTQModifier(targets="Linear", scheme="W8A8", ignore=IGNORE, **observed)
        return [quantizer] if method == "w8a8-gptq" else [*smooth, quantizer]
    kind, _, observer = method.partition("-")
    more: dict[str, Any] = (
        {"observer": {"mse": "memoryless_mse", "imatrix": "imatrix_mse"}[observer]} if observer else {}
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights(bits, **more)))
    quantizer = GPTQModifier if kind == "gptq" else QuantizationModifier
    chain: list[Any] = [AWQModifier()] if kind == "awq" else []
    return [*chain, quantizer(config_groups={"group_0": scheme}, ignore=IGNORE)]
