"""GGUF metadata -> Hugging Face's config.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.gguf_architectures import ARCHITECTURES, EXPERTS, MIXTRAL, Architecture
from octavo.checkpoint.gguf_file import GGUFFile
from octavo.errors import CheckpointError, UnsupportedModelError

ROPE_FACTORS = "rope_freqs.weight"
PHI_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
# Meta's constants for every Llama 3.1 and later; the file keeps only the factors that they make.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def architecture_of(file: GGUFFile) -> Architecture:
    """The file's architecture; UnsupportedModelError with its name when it is not one of ARCHITECTURES."""
    name = file.metadata.get("general.architecture")
    experts = file.metadata.get(f"{name}.expert_count", 0)
    if name not in ARCHITECTURES or (experts and name not in ("llama", *EXPERTS)):
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {name!r}{' with experts' if experts else ''} is not read; "
            f"{', '.join(ARCHITECTURES)} are. Use the model's safetensors checkpoint"
        )
    if file.metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{file.path} is one of {file.metadata['split.count']} parts; join them with llama-gguf-split --merge"
        )
    return MIXTRAL if experts and name == "llama" else ARCHITECTURES[str(name)]


def huggingface_config(file: GGUFFile) -> dict[str, Any]:
    """config.json as transformers would have it."""
    architecture = architecture_of(file)
    fields = _Fields(file.path, file.metadata, str(file.metadata["general.architecture"]))
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.optional("attention.key_length") or fields.optional("rope.dimension_count") or hidden // heads
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "hidden_act": architecture.activation,
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.optional("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, fields, head_dim),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
    }
    if architecture.model_type not in ("qwen2", "phi3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture.model_type in ("llama", "granite"):
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if window := fields.optional("attention.sliding_window"):
        config |= {"sliding_window": window, "use_sliding_window": True}
        if architecture.model_type == "llama":
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return config | _own_fields(architecture.model_type, config, fields) | token_ids(file.metadata)


def _own_fields(model_type: str, config: dict[str, Any], fields: _Fields) -> dict[str, Any]:
    """What only this kind of model has."""
    if model_type in ("gemma2", "gemma3_text"):
        return _gemma_fields(model_type, config, fields)
    if model_type == "granite":
        return {
            "attention_multiplier": fields.real("attention.scale", config["head_dim"] ** -0.5),
            "embedding_multiplier": fields.real("embedding_scale", 1.0),
            "residual_multiplier": fields.real("residual_scale", 1.0),
            "logits_scaling": fields.real("logit_scale", 1.0),
        }
    if model_type in ("qwen3_moe", "mixtral"):
        used = {"num_experts_per_tok": fields.integer("expert_used_count")}
        count = fields.integer("expert_count")
        if model_type == "mixtral":
            return used | {"num_local_experts": count}
        width = {"moe_intermediate_size": fields.integer("expert_feed_forward_length")}
        return used | width | {"num_experts": count, "norm_topk_prob": True, "mlp_only_layers": []}
    if model_type == "phi3":
        rotary = fields.optional("rope.dimension_count") or config["head_dim"]
        return {"partial_rotary_factor": rotary / config["head_dim"], "pad_token_id": None}
    return {}


def _gemma_fields(model_type: str, config: dict[str, Any], fields: _Fields) -> dict[str, Any]:
    """Windows alternate with full attention; the largest model of each generation scales queries by its own rule."""
    layers, heads, head_dim = config["num_hidden_layers"], config["num_attention_heads"], config["head_dim"]
    largest = layers == (46 if model_type == "gemma2" else 62)
    period = 2 if model_type == "gemma2" else 6
    kinds = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]
    found: dict[str, Any] = {
        "hidden_activation": config["hidden_act"],
        "query_pre_attn_scalar": config["hidden_size"] // heads if largest else head_dim,
        "layer_types": kinds,
    }
    if model_type == "gemma2":
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        return found | {key: fields.real(key, default) for key, default in caps.items()}
    return found | {"rope_local_base_freq": fields.real("rope.freq_base_swa", 10000.0)}


def token_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    """bos, eos and pad ids as generation_config.json has them; eos is a list when the file has an end of turn too."""
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in TOKEN_KEYS.items()}
    ends = [metadata[key] for key in END_KEYS if metadata.get(key) is not None]
    ends = list(dict.fromkeys(ends))
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return {name: value for name, value in ids.items() if value is not None}


TOKEN_KEYS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class _Fields:
    """The keys of one architecture, with errors that name them."""

    def __init__(self, path: Path, metadata: dict[str, Any], architecture: str) -> None:
        self._path, self._metadata, self._architecture = path, metadata, architecture

    def get(self, key: str) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}")

    def integer(self, key: str) -> int:
        value = self.optional(key)
        if not value:
            raise CheckpointError(f"{self._path}: metadata {self._architecture}.{key} is missing; download it again")
        return value

    def optional(self, key: str) -> int | None:
        value = self.get(key)
        if isinstance(value, list):
            if len(set(value)) > 1:
                raise UnsupportedModelError(
                    f"{self._path}: {self._architecture}.{key} differs between layers: {value}; use safetensors"
                )
            value = value[0] if value else None
        return None if value is None else int(value)

    def real(self, key: str, default: float) -> float:
        """float32 metadata as the shortest decimal that gives it: 1e-05, not 9.999999747378752e-06."""
        value = self.get(key)
        return default if value is None else float(str(np.float32(value)))


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing; download it again")
    return embedding.shape[0]


def _rope_scaling(file: GGUFFile, fields: _Fields, head_dim: int) -> dict[str, Any] | None:
    if PHI_FACTORS[0] in file.tensors:
        return _longrope(file, fields)
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, fields.real("rope.freq_base", 10000.0), head_dim)
    kind = fields.get("rope.scaling.type")
    factor = fields.real("rope.scaling.factor", fields.real("rope.scale_linear", 1.0))
    if kind in (None, "none", "") and factor == 1.0:
        return None
    if kind not in (None, "linear", "yarn", ""):
        raise UnsupportedModelError(f"{file.path}: rope scaling {kind!r} is not read; use the safetensors checkpoint")
    scaling: dict[str, Any] = {"rope_type": kind or "linear", "factor": factor}
    if (original := fields.optional("rope.scaling.original_context_length")) and kind == "yarn":
        scaling["original_max_position_embeddings"] = original
    return scaling


def _longrope(file: GGUFFile, fields: _Fields) -> dict[str, Any]:
    """Phi's factors, one a frequency, for contexts up to the original length and for longer ones."""
    short, long = (file.raw(file.tensors[name]).view(np.float32).tolist() for name in PHI_FACTORS)
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    return scaling | {"original_max_position_embeddings": fields.integer("rope.scaling.original_context_length")}


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The rope_scaling that made the file's factors; the largest factor is the scaling itself."""
    factors = file.raw(file.tensors[ROPE_FACTORS]).view(np.float32)
    factor = float(factors.max())
    if not np.allclose(llama3_factors(theta, head_dim, factor), factors, rtol=1e-4):
        raise UnsupportedModelError(f"{file.path}: {ROPE_FACTORS} is not Llama 3's rope scaling; use safetensors")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What Llama 3.1 divides each rotary frequency by: 1 for short waves, `factor` for long ones, smooth between."""
    original, low, high = (
        LLAMA3_ROPE[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, between))
