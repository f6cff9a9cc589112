"""Dense families: logits and greedy tokens equal transformers', and every configuration field that is read matters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import CASES
from fields import silent_fields
from harness import check_all_schedules, greedy_tokens, load, random_tokens, reference_logits, save_random

from octavo.models.decoder import DecoderLM


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save_random(CASES[name], tmp_path)
    model = load(tmp_path, model_impl="native")
    assert isinstance(model, DecoderLM)
    check_all_schedules(model, reference)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """64 steps, past the windows and past the context before rotary scaling, which begin at 32 tokens at most."""
    reference = save_random(CASES[name], tmp_path)
    prompt = random_tokens(96, 12, seed=5)
    got = greedy_tokens(load(tmp_path, model_impl="native"), prompt, 64)
    expected = reference_logits(reference, prompt + got)[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    assert got == expected


FAMILIES = list(dict.fromkeys(type(config).__name__ for config in CASES.values()))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_field_that_is_read_matters(family: str, tmp_path: Path) -> None:
    """In one of the family's models at least; where the model is served, its logits are transformers'."""
    cases = {name: config for name, config in CASES.items() if type(config).__name__ == family}
    assert silent_fields(cases, tmp_path) == [], "read, but another value neither moves the logits nor is refused"


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "granite"])
def test_blocks_that_differ_are_not_fused(name: str, tmp_path: Path) -> None:
    """The kernels of whole layers compute a pre-norm block with one rotary table and no multiplier of its halves."""
    save_random(CASES[name], tmp_path)
    model = load(tmp_path, torch.bfloat16)
    assert isinstance(model, DecoderLM)
    assert model._fused is None
