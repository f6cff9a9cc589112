"""DeepSeek: logits equal transformers' over a cache of latents, and every field read moves them."""

from __future__ import annotations

import json
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
from transformers import DeepseekV2Config, DeepseekV3Config

from octavo import LLM, SamplingParams
from octavo.core.cache_groups import KVCacheSpec
from octavo.errors import UnsupportedModelError, UserError

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
GROUPS = {"n_group": 4, "topk_group": 2}
CASES: dict[str, Any] = {
    "v2-lite": DeepseekV2Config(**{**SMALL, "q_lora_rank": None}, n_shared_experts=2),
    "v2": DeepseekV2Config(
        **SMALL, **GROUPS, topk_method="group_limited_greedy", routed_scaling_factor=2.0, rope_parameters=YARN
    ),
    "v2-biases": DeepseekV2Config(**SMALL, attention_bias=True, mlp_bias=True),
    "v3": DeepseekV3Config(**SMALL, **GROUPS, rope_parameters=YARN),
    "v3-halves": DeepseekV3Config(**{**SMALL, "q_lora_rank": None}, **GROUPS, rope_interleave=False),
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


OTHER_WEIGHTS = [  # values under which a checkpoint has other tensors, and settings within a field
    ("v2-lite", {"first_k_dense_replace": 0}),
    ("v2-lite", {"n_shared_experts": 1}),
    ("v2", {"n_group": 2}),
    ("v2", {"rope_parameters": {**YARN, "mscale_all_dim": 0.4}}),
    ("v3", {"rope_parameters": {**YARN, "mscale": 1.4}}),
    ("v3", {"rope_parameters": {**YARN, "factor": 8.0}}),
    ("v3", {"n_group": 2, "topk_group": 1}),
    ("v3-halves", {"q_lora_rank": 20}),
    ("v3-halves", {"attention_bias": True}),
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


def test_the_cache_holds_a_latent_row_once(tmp_path: Path) -> None:
    save_random(CASES["v3"], tmp_path)
    model = load(tmp_path, model_impl="native")
    assert model.kv_cache_specs() == [KVCacheSpec("full", 1, 24 + 8, None, 4, shares_values=True)] * 2
    assert model.kv_cache_specs()[0].bytes_per_token == (24 + 8) * 4
    cache = Driver(model).caches[0]
    assert cache.k.data_ptr() == cache.v.data_ptr()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("v2", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not 'greedy' or 'group_limited_greedy'"),
        ("v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not 'sigmoid'"),
        ("v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not 1"),
        ("v3", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not 4"),
        ("v3", {"n_group": 3}, "8 experts do not make 3 equal groups"),
        ("v3", {"n_group": 8, "topk_group": 4}, "groups of 1 expert"),
    ],
)
def test_what_is_not_native_is_refused(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_random(CASES[name], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path, model_impl="native")


def test_latent_attention_has_no_deterministic_kernel(tmp_path: Path) -> None:
    save_random(CASES["v3"], tmp_path)
    with pytest.raises(UserError, match="latent attention"):
        load(tmp_path, deterministic=True)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """64 steps, past the context before rotary scaling, which is 32 tokens."""
    reference = save_random(CASES[name], tmp_path)
    prompt = random_tokens(SMALL["vocab_size"], 12, seed=5)
    got = greedy_tokens(load(tmp_path, model_impl="native"), prompt, 64)
    expected = reference_logits(reference, prompt + got)[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    assert got == expected


def test_the_engine_serves_latents(tmp_path: Path) -> None:
    reference = save_random(CASES["v3"], tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, kv_cache_memory_bytes=2**20)
    prompts = [random_tokens(SMALL["vocab_size"], length, seed=length) for length in (5, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    for prompt, answer in zip(prompts, llm.generate([{"prompt_token_ids": p} for p in prompts], params), strict=True):
        got = list(answer.outputs[0].token_ids)
        expected = reference_logits(reference, prompt + got)[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        assert got == expected
