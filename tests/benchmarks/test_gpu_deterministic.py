"""benchmarks/gpu_deterministic.py on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_deterministic as script
import pytest
import torch


def test_all_ways_are_run_and_compared(tiny_llama: Path) -> None:
    prompts = script.random_prompts(4, 20, 40, 259)
    plan = script.Plan(str(tiny_llama), prompts, 24, {"dtype": "float32", "device": "cpu"})
    rows, _ = script.examine(plan, chunk=16)
    assert [row[0] for row in rows][:3] == ["in a batch", "prefix hit", "chunks of 16"]
    assert rows[3][0].endswith("preemptions")
    assert all(float(row[-1]) < 1e-3 for row in rows)


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "w4a16"), ("float32", "fp8")]
)
def test_the_deterministic_mode_gives_the_same_bits_in_every_way(
    tiny_llama: Path, dtype: str, quantization: str | None
) -> None:
    prompts = script.random_prompts(4, 20, 40, 259)
    kwargs = {"dtype": dtype, "quantization": quantization, "device": "cpu", "deterministic": True}
    rows, agrees = script.examine(script.Plan(str(tiny_llama), prompts, 24, kwargs), chunk=16)
    assert agrees, rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("quantization", [None, "fp8", "int8", "w4a16"])
def test_the_deterministic_mode_on_a_gpu(tmp_path: Path, quantization: str | None) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 2048,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = script.random_prompts(20, 33, 200, 2048)
    kwargs = {
        "load_format": "dummy", "quantization": quantization, "deterministic": True, "kv_cache_memory_bytes": 1 << 28
    }  # fmt: skip
    rows, agrees = script.examine(script.Plan(str(tmp_path), prompts, 64, kwargs), chunk=48)
    assert agrees, rows


def test_one_bit_and_one_token_are_noticed() -> None:
    alone = [([1, 2, 3], [-0.5, -0.25, -1.0]), ([4, 5, 6], [-1.0, -2.0, -3.0])]
    bit = [([1, 2, 3], [-0.5, -0.25000000000000006, -1.0]), alone[1]]
    token = [alone[0], ([4, 9, 6], [-1.0, -2.5, -3.0])]
    assert script.agreement(alone, alone) == (2, 2, None, 0.0)
    assert script.agreement(alone, bit)[:3] == (1, 2, 1) and script.agreement(alone, bit)[3] > 0
    assert script.agreement(alone, token) == (1, 1, 1, 0.0)
