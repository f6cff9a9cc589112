"""Families with their own kernels or paths on a GPU, through the engine: what the CPU says, and decodes in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import random_tokens, save_random
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from octavo import LLM, SamplingParams

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 96,
    "q_lora_rank": 80,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "v_head_dim": 40,
}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
GEMMA: dict[str, Any] = {**SMALL, "head_dim": 64, "sliding_window": 40, "query_pre_attn_scalar": 32}
CASES: dict[str, Any] = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=5),
    "qwen3-moe": Qwen3MoeConfig(
        **{**SMALL, "head_dim": 64}, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=96, norm_topk_prob=True
    ),
    "deepseek-v2": DeepseekV2Config(**{**LATENT, "q_lora_rank": None}, n_shared_experts=2),
    "deepseek-v3": DeepseekV3Config(**LATENT, **GROUPS),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=20.0, final_logit_softcapping=10.0),
    "gemma3": Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention", "full_attention"]),
}
PROMPTS = [random_tokens(SMALL["vocab_size"], length, seed=length) for length in (150, 70, 5)]


def run(folder: Path, device: str, dtype: str) -> tuple[list[list[int]], list[torch.Tensor], bool]:
    """The answers, the log-probability of each prompt token, and whether decodes ran in graphs."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prompt_logprobs=1, detokenize=False)
    with LLM(
        str(folder),
        device=device,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 26,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        graphs = getattr(llm.engine._runner, "_graphs", None)  # type: ignore[union-attr]
    values = []
    for ids, output in zip(PROMPTS, outputs, strict=True):
        entries = zip(ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        values.append(torch.tensor([entry[token].logprob for token, entry in entries if entry is not None]))
    return [output.outputs[0].token_ids for output in outputs], values, graphs is not None and graphs.failure is None


def typical(values: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Median difference of a token: rounding sends a few tokens to another expert, which is no fault."""
    assert [len(v) for v in values] == [len(ids) - 1 for ids in PROMPTS]
    return (torch.cat(values) - torch.cat(others)).abs().median().item()


@pytest.mark.parametrize("name", CASES)
def test_the_log_probabilities_spread(name: str, tmp_path: Path) -> None:
    """What the comparison on a GPU rests on: it is run on the CPU, in both types."""
    save_random(CASES[name], tmp_path, std=0.09)
    _, exact, _ = run(tmp_path, "cpu", "float32")
    _, rounded, _ = run(tmp_path, "cpu", "bfloat16")
    assert torch.cat(exact).std() > 0.5
    assert 1e-4 < typical(rounded, exact) < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_the_engine_on_a_gpu_says_what_it_says_on_the_cpu(name: str, tmp_path: Path) -> None:
    save_random(CASES[name], tmp_path, std=0.09)
    tokens, exact, _ = run(tmp_path, "cpu", "float32")
    gpu_tokens, gpu_exact, _ = run(tmp_path, "cuda", "float32")
    assert typical(gpu_exact, exact) < 1e-3
    assert gpu_tokens == tokens
    _, rounded, _ = run(tmp_path, "cpu", "bfloat16")
    _, gpu_rounded, uses_graphs = run(tmp_path, "cuda", "bfloat16")
    assert typical(gpu_rounded, exact) < 1.5 * typical(rounded, exact)
    assert uses_graphs
