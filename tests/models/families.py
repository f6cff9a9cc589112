"""The native dense families: small configurations of each, and another value for every field that a family reads."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 32,
}
GEMMA: dict[str, Any] = {**SMALL, "tie_word_embeddings": True, "head_dim": 16, "sliding_window": 20}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
}
GRANITE_HYBRID: dict[str, Any] = {
    **{**SMALL, **GRANITE},
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
    "mamba_n_heads": 4,
    "layer_types": ["full_attention"] * 2,
}
CASES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "llama-yarn": LlamaConfig(**SMALL, rope_parameters=YARN),
    "llama-llama3": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama-longrope": LlamaConfig(**SMALL, rope_parameters={**LONGROPE, "factor": 4.0}),
    "llama-linear": LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}),
    "mistral": MistralConfig(**SMALL, sliding_window=20),
    "granite": GraniteConfig(**SMALL, **GRANITE),
    "granite-4": GraniteMoeHybridConfig(**GRANITE_HYBRID, position_embedding_type="rope"),
    "granite-4-unrotated": GraniteMoeHybridConfig(**GRANITE_HYBRID),
    "qwen2": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": Qwen3Config(**SMALL, head_dim=16, use_sliding_window=True, sliding_window=18, max_window_layers=1),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=6.0, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 3},
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gemma3-capped": Gemma3TextConfig(
        **GEMMA,
        query_pre_attn_scalar=8,
        final_logit_softcapping=6.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": Phi3Config(**SMALL, sliding_window=20),
    "phi3-partial": Phi3Config(
        **{**SMALL, "hidden_size": 64}, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}
    ),
    "phi3-longrope": Phi3Config(**SMALL, rope_parameters=LONGROPE, original_max_position_embeddings=32),
    "olmo2": Olmo2Config(**SMALL),
}

# Another value of each field that any family reads, TURNED_ROUND apart; with the same weights it moves the logits, or
# is refused by name.
ROPE = {"rope_type": "default", "rope_theta": 300.0}
OTHER: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 48,
    "intermediate_size": 24,
    "shared_intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 64,
    "rope_parameters": ROPE,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 0.3,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "silu",
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 9,
    "use_sliding_window": False,
    "max_window_layers": 0,
    "layer_types": None,  # turned round
    "position_embedding_type": None,  # turned round
    "num_local_experts": 4,
    "attention_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.9,
    "logits_scaling": 0.4,
    "query_pre_attn_scalar": 30,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 3.0,
    "use_bidirectional_attention": True,
    "original_max_position_embeddings": 8,  # short of the test's tokens: LongRoPE chooses by what is served
    "rope_theta": 300.0,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "rope_local_base_freq": 3000.0,
    "sliding_window_pattern": 3,
    "layers_block_type": ["mamba", "mamba"],
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "n_routed_experts": 4,
    "n_shared_experts": 3,
    "routed_scaling_factor": 0.5,
    "n_group": 2,
    "topk_group": 3,
    "topk_method": None,  # turned round
    "scoring_func": "tanh",
    "first_k_dense_replace": 0,
    "moe_layer_freq": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
TURNED_ROUND = ("tie_word_embeddings", "norm_topk_prob", "rope_interleave")  # flags whose default differs by family

# Fields of files from before transformers 5 that have new names now, by model_type.
OLD: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window_pattern": 2},
    "granitemoehybrid": {"layers_block_type": ["attention", "attention"]},
}
