"""Variants within native families: optional biases, head sizes, windows, and every setting of rotary scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES as FAMILY_CASES
from families import LLAMA3, SMALL, YARN
from harness import Driver, assert_close, check_all_schedules, load, random_tokens, reference_logits, save_random
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from octavo.models.decoder import DecoderLM

VARIANTS: dict[str, Any] = {
    "llama-tied-biases": LlamaConfig(**{**SMALL, "tie_word_embeddings": True}, attention_bias=True, mlp_bias=True),
    "llama-head-dim": LlamaConfig(**SMALL, head_dim=16, rope_parameters=LLAMA3),
    "llama-dynamic": LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}),
    "llama-gelu": LlamaConfig(**SMALL, hidden_act="gelu_pytorch_tanh"),
    "mistral-full": MistralConfig(**SMALL, sliding_window=None),
    "qwen2-full": Qwen2Config(**SMALL),
    "qwen3-full": Qwen3Config(**SMALL, head_dim=16),
    "qwen3-bias-window": Qwen3Config(
        **SMALL,
        head_dim=8,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=18,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save_random(VARIANTS[name], tmp_path)
    model = load(tmp_path, model_impl="native")
    assert isinstance(model, DecoderLM)
    check_all_schedules(model, reference)


ROPES: list[dict[str, Any]] = [
    LLAMA3,
    {**LLAMA3, "factor": 8.0},
    YARN,
    {**YARN, "attention_factor": 1.5},
    {**YARN, "beta_fast": 8, "beta_slow": 2},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    {**YARN, "truncate": False},
]


def logits_of(path: Path, tokens: list[int]) -> torch.Tensor:
    driver = Driver(load(path, model_impl="native"))
    sequence = driver.add(tokens)
    driver.step([(sequence, len(tokens))])
    return torch.stack([sequence.logits[position] for position in range(len(tokens))])


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(rope))
def test_each_rotary_setting_moves_the_logits_as_in_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    save_random(FAMILY_CASES["llama"], before)
    reference = save_random(LlamaConfig(**SMALL, rope_parameters=rope), after)
    tokens = random_tokens(SMALL["vocab_size"], 50, seed=3)
    was, now = logits_of(before, tokens), logits_of(after, tokens)
    assert (now - was).abs().max() > 0.02 * (was.max() - was.min()), "the setting does not matter in this test"
    assert_close(now, reference_logits(reference, tokens))
