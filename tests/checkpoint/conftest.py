"""Small checkpoints made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, quants


def permute_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama: the two halves of a head are interleaved."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[module]}.{kind}"


def write_gguf(
    path: Path,
    model: Any,
    architecture: str = "llama",
    kind: Kind = Kind.F32,
    metadata: Callable[[GGUFWriter], None] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    leave_out: str = "",
) -> dict[str, torch.Tensor]:
    """A transformers model as GGUF; matrices become `kind`. Returns what a reader must find, by Hugging Face name."""
    config, expected = model.config, {}
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 0)
    if metadata is not None:
        metadata(writer)
    for name, tensor in model.state_dict().items():
        if name == leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        array = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        permuted = permute_heads(array, heads) if heads and architecture == "llama" else array
        this_kind = kind if array.ndim == 2 else Kind.F32
        stored = quants.quantize(permuted, this_kind)
        expected[name] = torch.tensor(quants.dequantize(quants.quantize(array, this_kind), this_kind))
        writer.add_tensor(gguf_name(name), stored, raw_dtype=this_kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="session")
def small_models() -> dict[str, Any]:
    """Random transformers models of the three GGUF architectures, with everything optional set to odd values."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_theta=5e5, attention_bias=True)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**sizes, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=32, rms_norm_eps=1e-6, rope_theta=1e6)),
    }
    for model in models.values():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.normal_(1.0, 0.3)
    return models


@pytest.fixture
def gguf_writer() -> Callable[..., dict[str, torch.Tensor]]:
    return write_gguf
