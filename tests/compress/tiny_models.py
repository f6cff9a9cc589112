"""Small random models for the compression tests, and a tokenizer-free way to calibrate them."""

from __future__ import annotations

from typing import Any

import torch

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def tiny_model(family: str, **changes: Any) -> Any:
    """A random float32 model whose logits spread."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(TINY)
    if family in ("opt", "gpt_neox"):
        settings.pop("num_key_value_heads")
    if family == "opt":
        settings |= {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}
        del settings["intermediate_size"], settings["initializer_range"]
    if family == "gemma2":
        settings |= {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(settings | changes))).eval()


def token_samples(count: int = 6, length: int = 24, seed: int = 3) -> list[list[int]]:
    """Random token ids, as a dataset of sequences."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (count, length), generator=generator).tolist()
