"""Dense families: logits and greedy tokens equal transformers', and every configuration field that is read matters."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES, OLD, OTHER
from harness import (
    Driver,
    assert_close,
    check_all_schedules,
    greedy_tokens,
    load,
    random_tokens,
    reference_logits,
    save_random,
)
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

import octavo.models
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.decoder import DecoderLM
from octavo.models.registry import native_config

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save_random(CASES[name], tmp_path)
    model = load(tmp_path, model_impl="native")
    assert isinstance(model, DecoderLM)
    check_all_schedules(model, reference, tolerance=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """64 steps, past the windows and past the context before rotary scaling, which begin at 32 tokens at most."""
    reference = save_random(CASES[name], tmp_path)
    prompt = random_tokens(96, 12, seed=5)
    got = greedy_tokens(load(tmp_path, model_impl="native"), prompt, 64)
    expected = reference_logits(reference, prompt + got)[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    assert got == expected


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
    assert name in OTHER, f"{name} is read, but this test has no other value for it: add one to families.OTHER"
    if name == "tie_word_embeddings":
        return not config.get(name)
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
    assert_close(now, reference, TOLERANCE)
    if field == "tie_word_embeddings":
        return True  # these files have both weights, and what is in them decides
    before, longest = logits_of(write(folder.with_suffix(".before"), form, weights), tokens)
    moved = (now - before).abs().max() > 100 * TOLERANCE * (before.max() - before.min())
    return bool(moved) or longest != longest_now


FAMILIES = list(dict.fromkeys(type(config).__name__ for config in CASES.values()))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_field_that_is_read_matters(family: str, tmp_path: Path) -> None:
    """In one of the family's models at least; where the model is served, its logits are transformers'."""
    unsettled: dict[str, str] = {}
    settled: set[str] = set()
    for name in (name for name, config in CASES.items() if type(config).__name__ == family):
        save_random(CASES[name], tmp_path / name)
        weights = tmp_path / name / "model.safetensors"
        for age, form in enumerate(forms(json.loads((tmp_path / name / "config.json").read_text()))):
            for field in sorted(field_names() - settled - {"architectures"}):
                if not is_read(form, field):
                    continue
                if matters(tmp_path / f"{name}-{age}-{field}", form, field, weights):
                    settled.add(field)
                else:
                    unsettled[field] = name
    silent = sorted(unsettled.keys() - settled)
    assert not silent, f"{silent}: read, but another value neither moves the logits nor is refused"


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "granite"])
def test_blocks_that_differ_are_not_fused(name: str, tmp_path: Path) -> None:
    """The kernels of whole layers compute a pre-norm block with one rotary table and no multiplier of its halves."""
    save_random(CASES[name], tmp_path)
    model = load(tmp_path, torch.bfloat16)
    assert isinstance(model, DecoderLM)
    assert model._fused is None
