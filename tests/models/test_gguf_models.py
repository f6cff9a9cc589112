"""GGUF files of each architecture, named by the gguf package, give the logits of the model that they were made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from harness import Driver, assert_close, load, random_tokens, reference_logits, spread_weights
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3MoeConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 4.0]}
LONGROPE |= {"long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0], "original_max_position_embeddings": 128}
SIX_LAYERS = SIZES | {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
CASES: dict[str, Any] = {
    "gemma": GemmaConfig(**SIZES, head_dim=16),
    "gemma2": Gemma2Config(**SIX_LAYERS | {"num_hidden_layers": 2}, final_logit_softcapping=20.0),
    "gemma3": Gemma3TextConfig(**SIX_LAYERS),
    "phi3": Phi3Config(**SIZES, tie_word_embeddings=False),
    "phi3-longrope": Phi3Config(**SIZES, tie_word_embeddings=False, rope_scaling=LONGROPE),
    "granite": GraniteConfig(**SIZES, attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.7),
    "olmo2": Olmo2Config(**SIZES, tie_word_embeddings=False),
    "qwen3moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
}
PERMUTED = ("granite", "mixtral")


def metadata(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if name in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if name in ("qwen3moe", "mixtral"):
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    if name == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if name == "phi3-longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.asarray(rope[f"{kind}_factor"], dtype=np.float32))


def stored(model: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """(ggml's name, content) of each tensor, with what llama.cpp's converter does to it."""
    architecture = {"mixtral": "llama"}.get(name, name.split("-")[0])
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if ".experts." in key:
            yield from experts(key, array)
            continue
        if name in PERMUTED and (count := heads.get(key.split(".")[-2])):
            array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            array = array + 1
        found = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if found is None and key.endswith("mlp.gate.weight"):
            found = f"blk.{key.split('.')[2]}.ffn_gate_inp.weight"
        assert found is not None, key
        yield found, np.ascontiguousarray(array)


def experts(key: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    block = f"blk.{key.split('.')[2]}"
    if key.endswith("down_proj"):
        yield f"{block}.ffn_down_exps.weight", array
        return
    gate, up = np.split(array, 2, axis=1)
    yield f"{block}.ffn_gate_exps.weight", np.ascontiguousarray(gate)
    yield f"{block}.ffn_up_exps.weight", np.ascontiguousarray(up)


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_logits_of_its_model(name: str, tmp_path: Path) -> None:
    config = CASES[name]
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    spread_weights(reference, std=0.15)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, {"mixtral": "llama"}.get(name, name.split("-")[0]))
    metadata(writer, config, name)
    for key, array in stored(reference, name):
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = load(path)
    tokens = random_tokens(96, 40, seed=3)
    driver = Driver(model)
    sequence = driver.add(tokens)
    for size in (25, 1, 14):
        driver.step([(sequence, size)])
    got = torch.stack([sequence.logits[position] for position in range(len(tokens))])
    assert_close(got, reference_logits(reference, tokens))
