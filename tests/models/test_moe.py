"""Mixtures of experts: logits equal transformers' however the tokens are scheduled, and every field read moves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fields import silent_fields
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
from transformers import MixtralConfig, Qwen3MoeConfig

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
QWEN: dict[str, Any] = {**SMALL, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
CASES: dict[str, Any] = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=5),
    "mixtral-window": MixtralConfig(**SMALL, num_local_experts=4, sliding_window=20),
    "qwen3-moe": Qwen3MoeConfig(**QWEN, head_dim=16),
    "qwen3-moe-window": Qwen3MoeConfig(**QWEN, head_dim=16, use_sliding_window=True, sliding_window=20),
    "qwen3-moe-dense-layer": Qwen3MoeConfig(
        **{**QWEN, "num_hidden_layers": 3}, mlp_only_layers=[0], norm_topk_prob=True, attention_bias=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save_random(CASES[name], tmp_path)
    check_all_schedules(load(tmp_path, model_impl="native"), reference)


FAMILIES = list(dict.fromkeys(type(config).__name__ for config in CASES.values()))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_field_that_is_read_matters(family: str, tmp_path: Path) -> None:
    cases = {name: config for name, config in CASES.items() if type(config).__name__ == family}
    assert silent_fields(cases, tmp_path) == [], "read, but another value neither moves the logits nor is refused"


OTHER_WEIGHTS = [  # values under which a checkpoint has other tensors
    ("qwen3-moe", {"decoder_sparse_step": 2}),
    ("qwen3-moe", {"mlp_only_layers": [1]}),
]


def logits_of(path: Path, tokens: list[int]) -> torch.Tensor:
    driver = Driver(load(path, model_impl="native"))
    sequence = driver.add(tokens)
    driver.step([(sequence, len(tokens))])
    return torch.stack([sequence.logits[position] for position in range(len(tokens))])


@pytest.mark.parametrize(("name", "change"), OTHER_WEIGHTS, ids=str)
def test_each_field_moves_the_logits_as_in_transformers(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    base = CASES[name]
    before, after = tmp_path / "before", tmp_path / "after"
    save_random(base, before)
    reference = save_random(type(base)(**{**base.to_dict(), **change}), after)
    tokens = random_tokens(SMALL["vocab_size"], 50, seed=3)
    was, now = logits_of(before, tokens), logits_of(after, tokens)
    assert (now - was).abs().max() > 0.02 * (was.max() - was.min()), "the field does not matter in this test"
    assert_close(now, reference_logits(reference, tokens))


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save_random(CASES[name], tmp_path)
    prompt = random_tokens(SMALL["vocab_size"], 12, seed=5)
    got = greedy_tokens(load(tmp_path, model_impl="native"), prompt, 64)
    expected = reference_logits(reference, prompt + got)[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    assert got == expected


def test_experts_in_two_tensors_are_read_as_well(tmp_path: Path) -> None:
    reference = save_random(CASES["mixtral"], tmp_path)
    reference.save_pretrained(tmp_path, save_original_format=False)
    tokens = random_tokens(SMALL["vocab_size"], 30, seed=3)
    assert_close(logits_of(tmp_path, tokens), reference_logits(reference, tokens))


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.99), ("fp8", 0.9)])
def test_experts_are_quantized_on_load(quantization: str, least: float, tmp_path: Path) -> None:
    reference = save_random(CASES["mixtral"], tmp_path)
    model = load(tmp_path, quantization=quantization)
    assert model.weight_bytes() < 0.6 * load(tmp_path).weight_bytes()
    driver = Driver(model)
    sequence = driver.add(random_tokens(SMALL["vocab_size"], 30, seed=3))
    driver.step([(sequence, 30)])
    logits = torch.stack([sequence.logits[position] for position in range(30)])
    pair = torch.stack([logits.flatten(), reference_logits(reference, sequence.tokens).flatten()])
    assert torch.corrcoef(pair)[0, 1] > least
