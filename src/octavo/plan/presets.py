"""Configurations that `octavo plan` knows without a download: the models that courses and articles calculate with.

Only the fields that sizes depend on, as their publishers' config.json state them.
"""

from __future__ import annotations

from typing import Any

_LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_LLAMA4_SCOUT_TEXT: dict[str, Any] = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 8192,
    "vocab_size": 202048,
    "tie_word_embeddings": False,
}
_LLAMA4_VISION: dict[str, Any] = {
    "hidden_size": 1408,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "image_size": 336,
    "patch_size": 14,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "vision_output_dim": 4096,
}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
    },
    "llama-3-70b": {
        **_LLAMA3,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "intermediate_size": 28672,
    },
    "llama-4-scout": {
        "model_type": "llama4",
        "torch_dtype": "bfloat16",
        "text_config": _LLAMA4_SCOUT_TEXT,
        "vision_config": _LLAMA4_VISION,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "demo": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
}


def find_preset(name: str) -> dict[str, Any] | None:
    """By name, without regard to case and to the publisher before a slash and the suffixes of instruct versions."""
    key = name.lower().removesuffix("-instruct")
    short = {
        "meta-llama/meta-llama-3-70b": "llama-3-70b",
        "meta-llama/llama-3.1-8b": "llama-3.1-8b",
        "qwen/qwen3-0.6b": "qwen3-0.6b",
    }
    return PRESETS.get(short.get(key, key))
