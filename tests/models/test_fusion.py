"""The one call that runs all layers gives the very numbers of the layers one by one, in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Driver, load, random_tokens, save_random
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from octavo.models.decoder import DecoderLM
from octavo.ops.cpu import library

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CASES = {
    "llama": LlamaConfig(**SHAPE),
    "llama-biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh"),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=20),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
}


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no CPU kernels here: {library.unavailable()}")
@pytest.mark.parametrize("name", CASES)
def test_fused_layers_equal_single_operations(tmp_path: Path, name: str) -> None:
    save_random(CASES[name], tmp_path)
    logits = []
    for is_fused in (True, False):
        model = load(tmp_path, torch.bfloat16)
        assert isinstance(model, DecoderLM)
        assert model._fused is not None
        if not is_fused:
            model._fused = None
        driver = Driver(model)
        first = driver.add(random_tokens(96, 60, 1))
        second = driver.add(random_tokens(96, 40, 2))
        driver.step([(first, 30)])
        driver.step([(first, 1), (second, 25)])  # a decode beside a chunk of a prompt
        driver.step([(first, 1), (second, 1)])
        driver.step([(second, 14), (first, 20)])
        logits.append([first.logits, second.logits])
    for fused, single in zip(*logits, strict=True):
        assert fused.keys() == single.keys()
        assert all(torch.equal(fused[position], single[position]) for position in fused)
