"""Native families: logits equal transformers' however the tokens are scheduled, and every field read moves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Driver, assert_close, check_all_schedules, load, random_tokens, reference_logits, save_random
from transformers import GraniteConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from octavo.models.decoder import DecoderLM

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied-biases": LlamaConfig(**{**SMALL, "tie_word_embeddings": True}, attention_bias=True, mlp_bias=True),
    "llama-head-dim": LlamaConfig(**SMALL, head_dim=16, rope_parameters=LLAMA3_ROPE),
    "llama-yarn": LlamaConfig(**SMALL, rope_parameters=YARN_ROPE),
    "llama-linear": LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}),
    "llama-dynamic": LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}),
    "llama-gelu": LlamaConfig(**SMALL, hidden_act="gelu_pytorch_tanh"),
    "mistral": MistralConfig(**SMALL, sliding_window=20),
    "mistral-full": MistralConfig(**SMALL, sliding_window=None),
    "granite": GraniteConfig(
        **SMALL, embedding_multiplier=3.0, logits_scaling=0.7, residual_multiplier=0.6, attention_multiplier=0.2
    ),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2-window": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen3-bias-window": Qwen3Config(
        **SMALL,
        head_dim=8,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=18,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save_random(CASES[name], tmp_path)
    model = load(tmp_path, model_impl="native")
    assert isinstance(model, DecoderLM)
    check_all_schedules(model, reference)


FIELDS = [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": {**LLAMA3_ROPE, "factor": 8.0}}),
    ("llama", {"rope_parameters": YARN_ROPE}),
    ("llama", {"rope_parameters": {**YARN_ROPE, "attention_factor": 1.5}}),
    ("llama", {"rope_parameters": {**YARN_ROPE, "beta_fast": 8, "beta_slow": 2}}),
    ("llama", {"rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    ("llama", {"rope_parameters": {**YARN_ROPE, "truncate": False}}),
    ("llama", {"rms_norm_eps": 0.3}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("mistral", {"sliding_window": 9}),
    ("mistral", {"sliding_window": None}),
    ("granite", {"embedding_multiplier": 2.0}),
    ("granite", {"logits_scaling": 0.4}),
    ("granite", {"residual_multiplier": 0.9}),
    ("granite", {"attention_multiplier": 0.5}),
    ("qwen2-window", {"sliding_window": 9}),
    ("qwen2-window", {"use_sliding_window": False, "layer_types": None}),
    ("qwen2-window", {"max_window_layers": 0, "layer_types": None}),
    ("qwen3-bias-window", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("qwen3", {"rms_norm_eps": 0.3}),
]


def logits_of(path: Path, tokens: list[int]) -> torch.Tensor:
    driver = Driver(load(path, model_impl="native"))
    sequence = driver.add(tokens)
    driver.step([(sequence, len(tokens))])
    return torch.stack([sequence.logits[position] for position in range(len(tokens))])


@pytest.mark.parametrize(("name", "change"), FIELDS, ids=[f"{name}-{'-'.join(change)}" for name, change in FIELDS])
def test_each_field_moves_the_logits_as_in_transformers(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    base = CASES[name]
    before, after = tmp_path / "before", tmp_path / "after"
    save_random(base, before)
    reference = save_random(type(base)(**{**base.to_dict(), **change}), after)
    tokens = random_tokens(SMALL["vocab_size"], 50, seed=3)
    was, now = logits_of(before, tokens), logits_of(after, tokens)
    assert (now - was).abs().max() > 0.02 * (was.max() - was.min()), "the field does not matter in this test"
    assert_close(now, reference_logits(reference, tokens))
