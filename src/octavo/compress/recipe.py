"""Recipes: modifiers as objects, as YAML in LLM Compressor's form, or from the command line's flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from octavo.compress.modifiers.awq import AWQModifier
from octavo.compress.modifiers.base import Modifier
from octavo.compress.modifiers.gptq import GPTQModifier
from octavo.compress.modifiers.magnitude import ConstantPruningModifier, MagnitudePruningModifier
from octavo.compress.modifiers.quantization import QuantizationModifier
from octavo.compress.modifiers.quip import QuIPModifier
from octavo.compress.modifiers.smoothquant import LogarithmicEqualizationModifier, SmoothQuantModifier
from octavo.compress.modifiers.sparsegpt import SparseGPTModifier
from octavo.compress.modifiers.spinquant import SpinQuantModifier
from octavo.compress.modifiers.wanda import WandaPruningModifier
from octavo.errors import UserError

MODIFIERS: dict[str, type[Modifier]] = {
    "QuantizationModifier": QuantizationModifier,
    "GPTQModifier": GPTQModifier,
    "SparseGPTModifier": SparseGPTModifier,
    "WandaPruningModifier": WandaPruningModifier,
    "MagnitudePruningModifier": MagnitudePruningModifier,
    "ConstantPruningModifier": ConstantPruningModifier,
    "SpinQuantModifier": SpinQuantModifier,
    "QuIPModifier": QuIPModifier,
    "AWQModifier": AWQModifier,
    "SmoothQuantModifier": SmoothQuantModifier,
    "LogarithmicEqualizationModifier": LogarithmicEqualizationModifier,
}


def parse_recipe(recipe: Any) -> list[Modifier]:
    """Modifiers of a recipe, in order: a modifier, a list of them, a mapping, YAML text, or the path of a YAML file.

    In YAML, keys end in `_stage` (holding `_modifiers` keys) or `_modifiers` (holding class name -> arguments).
    UserError names whatever does not fit.
    """
    if isinstance(recipe, Modifier):
        return recipe.expanded()
    if isinstance(recipe, list | tuple):
        return [modifier for part in recipe for modifier in parse_recipe(part)]
    if isinstance(recipe, str | Path):
        return _from_mapping(_load(recipe))
    if isinstance(recipe, Mapping):
        return _from_mapping(recipe)
    raise UserError(
        f"recipe is a {type(recipe).__name__}; it must be a modifier, a list of them, YAML or the path of a YAML file",
        param="recipe",
    )


def _load(recipe: str | Path) -> Mapping[str, Any]:
    is_path = isinstance(recipe, Path) or ("\n" not in recipe and recipe.endswith((".yaml", ".yml", ".json")))
    text = str(recipe)
    if is_path:
        path = Path(recipe).expanduser()
        if not path.is_file():
            raise UserError(f"recipe file {path} is not there", param="recipe")
        text = path.read_text(encoding="utf-8")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the recipe is not YAML: {' '.join(str(error).split())}", param="recipe") from None
    if not isinstance(content, Mapping):
        raise UserError(
            "the recipe must be a mapping of stages (`quant_stage:`) or a path ending in .yaml", param="recipe"
        )
    return content


def _from_mapping(content: Mapping[str, Any]) -> list[Modifier]:
    modifiers: list[Modifier] = []
    for key, value in content.items():
        if not isinstance(value, Mapping) or not str(key).endswith(("_stage", "_modifiers")):
            raise UserError(
                f"recipe key {key!r} is not understood; keys end in _stage or _modifiers and hold mappings",
                param="recipe",
            )
        if str(key).endswith("_stage"):
            modifiers += _from_mapping(value)
        else:
            modifiers += [part for name, given in value.items() for part in _modifier(name, given).expanded()]
    if not modifiers:
        raise UserError(f"the recipe names no modifier; known are {', '.join(MODIFIERS)}", param="recipe")
    return modifiers


def _modifier(name: str, arguments: Any) -> Modifier:
    if name not in MODIFIERS:
        raise UserError(f"modifier {name!r} is unknown; there are {', '.join(MODIFIERS)}", param="recipe")
    kind = MODIFIERS[name]
    given = {} if arguments is None else arguments
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    unknown = [key for key in given if key not in fields] if isinstance(given, Mapping) else [given]
    if unknown:
        raise UserError(f"{name} takes no {unknown[0]!r}; it takes {', '.join(fields)}", param="recipe")
    return kind(**given)


def dump_recipe(modifiers: list[Modifier]) -> str:
    """The recipe as YAML; `parse_recipe` reads it back to the same modifiers."""
    stages = {}
    for index, modifier in enumerate(modifiers):
        suffix = "" if len(modifiers) == 1 else f"_{index}"
        stages[f"default{suffix}_modifiers"] = {type(modifier).__name__: _plain(modifier.to_recipe())}
    return yaml.safe_dump({"default_stage": stages}, sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
