"""Whether every field that a native family reads of a configuration matters: moves the logits, or is refused."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from families import OLD, OTHER, TURNED_ROUND
from harness import TOLERANCE, Driver, assert_close, load, random_tokens, reference_logits, save_random
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

import octavo.models
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.registry import native_config


def silent_fields(cases: dict[str, Any], folder: Path) -> list[str]:
    """Fields that are read in these models (name -> configuration) of a family, and matter in none of them.

    Where another value is served, its logits have to be transformers'.
    """
    unsettled: set[str] = set()
    settled: set[str] = set()
    for name, config in cases.items():
        save_random(config, folder / name)
        weights = folder / name / "model.safetensors"
        for age, form in enumerate(forms(json.loads((folder / name / "config.json").read_text()))):
            for field in sorted(field_names() - settled - {"architectures"}):
                if not is_read(form, field):
                    continue
                matter = matters(folder / f"{name}-{age}-{field}", form, field, weights)
                (settled if matter else unsettled).add(field)
    return sorted(unsettled - settled)


class Touched(Exception):
    """A marked value was looked at."""


class Marked:
    """A value that cannot be looked at unnoticed: whatever reads it raises."""

    def _touch(self, *_: Any) -> Any:
        raise Touched

    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = __eq__ = __hash__ = __repr__ = _touch
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __mul__ = __truediv__ = __pow__ = __getitem__ = __getattr__ = _touch


@cache
def field_names() -> frozenset[str]:
    """Every name that the families' code looks up in a dictionary."""
    models = Path(octavo.models.__path__[0])
    found = set()
    for file in (*models.glob("*.py"), models.parent / "layers" / "rotary.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                found |= {
                    arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                }
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                found |= {node.slice.value} if isinstance(node.slice.value, str) else set()
    return frozenset(found)


def is_read(config: dict[str, Any], name: str) -> bool:
    """Whether the native reading of a configuration looks at the field."""
    try:
        repr(native_config(config["architectures"][0], config | {name: Marked()}))
    except (Touched, CheckpointError, TypeError):  # TypeError: one value among several that were joined or compared
        return True
    return False


NEW_NAMES = ("rope_parameters", "layer_types")  # files from before transformers 5 have other fields instead


def forms(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The file as transformers writes it, and as it was written before it had some of these fields."""
    old = {key: value for key, value in config.items() if key not in NEW_NAMES}
    return [config, old | OLD.get(config["model_type"], {})]


def other_value(config: dict[str, Any], name: str) -> Any:
    if name in TURNED_ROUND:
        return not config.get(name)
    assert name in OTHER, f"{name} is read, but this test has no other value for it: add one to families.OTHER"
    if name == "topk_method":
        return "group_limited_greedy" if config.get(name) == "greedy" else "greedy"
    if name == "position_embedding_type":
        return None if config.get(name) == "rope" else "rope"
    if name == "layer_types":
        windows = ["sliding_attention", "full_attention"]
        return [windows[kind == "sliding_attention"] for kind in config.get(name) or windows[:1] * 2]
    value = OTHER[name]
    return value[: config["num_hidden_layers"]] if isinstance(value, list) else value


def write(folder: Path, config: dict[str, Any], weights: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(weights)
    return folder


def logits_of(path: Path, tokens: list[int]) -> tuple[torch.Tensor, int]:
    model = load(path, model_impl="native")
    driver = Driver(model)
    sequence = driver.add(tokens)
    driver.step([(sequence, len(tokens))])
    return torch.stack([sequence.logits[position] for position in range(len(tokens))]), model.max_position


def reference_of(path: Path, tokens: list[int]) -> torch.Tensor | None:
    """The logits of transformers' model; None for a configuration that it does not accept."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
        return reference_logits(model, tokens)
    except (ValueError, StrictDataclassError):
        return None


def matters(folder: Path, form: dict[str, Any], field: str, weights: Path) -> bool:
    """Whether another value is refused, or moves the logits; they then have to be transformers'."""
    tokens = random_tokens(80, 50, seed=3)
    after = write(folder, form | {field: other_value(form, field)}, weights)
    try:
        now, longest_now = logits_of(after, tokens)
    except (CheckpointError, UnsupportedModelError):
        return True
    reference = reference_of(after, tokens)
    if reference is None:
        return False
    assert_close(now, reference)
    if field == "tie_word_embeddings":
        return True  # these files have both weights, and what is in them decides
    before, longest = logits_of(write(folder.with_suffix(".before"), form, weights), tokens)
    moved = (now - before).abs().max() > 100 * TOLERANCE * (before.max() - before.min())
    return bool(moved) or longest != longest_now
