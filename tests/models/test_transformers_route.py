"""The generic route: logits equal transformers' own, for families without a native implementation and some with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import CASES as NATIVE_CASES
from harness import check_all_schedules, load, save_random
from test_native import VARIANTS
from transformers import (
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeConfig,
    HunYuanDenseV1Config,
    MinistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.models.registry import NATIVE
from octavo.models.table import GENERIC
from octavo.models.transformers_experts import SERVED, RoutedExperts
from octavo.models.transformers_route import TransformersLM

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 32,
}
HYBRID: dict[str, Any] = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
FALCON = {key: value for key, value in SMALL.items() if key != "intermediate_size"} | {"ffn_hidden_size": 48}
CASES: dict[str, PreTrainedConfig] = {
    "falcon-one-key-head": FalconConfig(**FALCON),
    "falcon-grouped": FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-grouped-one-norm": FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, tie_word_embeddings=False
    ),
    "falcon-sequential": FalconConfig(**FALCON, multi_query=False, parallel_attn=False, bias=True),
    "stablelm": StableLmConfig(**GROUPED, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
    "stablelm-parallel": StableLmConfig(
        **GROUPED, use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True, tie_word_embeddings=True
    ),
    "gpt_neox": GPTNeoXConfig(**SMALL, rotary_pct=0.5, use_parallel_residual=True),
    "gpt_neox-sequential": GPTNeoXConfig(
        **SMALL, rotary_pct=1.0, use_parallel_residual=False, tie_word_embeddings=True
    ),
    "opt": OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32),
    "opt-projected": OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False),
    "phi3": Phi3Config(**GROUPED, sliding_window=20),
    "phi3-longrope": Phi3Config(**GROUPED, rope_parameters=LONGROPE, original_max_position_embeddings=32),
    "olmo2": Olmo2Config(**GROUPED),
    "gemma2": Gemma2Config(
        **GROUPED,
        head_dim=16,
        sliding_window=20,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=6.0,
        query_pre_attn_scalar=8,
    ),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-window": MixtralConfig(**GROUPED, num_local_experts=12, num_experts_per_tok=2, sliding_window=20),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "gpt2": GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128, pad_token_id=0, bos_token_id=1, eos_token_id=2
    ),
    "gpt_oss": GptOssConfig(
        **GROUPED,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=20,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "gptj": GPTJConfig(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128, rotary_dim=4, bos_token_id=1, eos_token_id=2
    ),
    "phi": PhiConfig(**GROUPED),
    "starcoder2": Starcoder2Config(**GROUPED, sliding_window=20),
    "cohere": CohereConfig(**GROUPED, logit_scale=1.5),
    "cohere2": Cohere2Config(**GROUPED, **HYBRID, logit_scale=1.5),
    "nemotron": NemotronConfig(**GROUPED, head_dim=8, partial_rotary_factor=0.5),
    "exaone4": Exaone4Config(**GROUPED, **HYBRID),
    "glm": GlmConfig(**GROUPED, head_dim=8),
    "glm4": Glm4Config(**GROUPED, head_dim=8),
    "smollm3": SmolLM3Config(**GROUPED, no_rope_layers=[1, 0]),
    "seed_oss": SeedOssConfig(**GROUPED, head_dim=8),
    "olmo3": Olmo3Config(**GROUPED, **HYBRID),
    "ministral": MinistralConfig(**GROUPED, head_dim=8, sliding_window=20),
    "hunyuan_v1": HunYuanDenseV1Config(**GROUPED, head_dim=8),
    "ernie4_5": Ernie4_5Config(**GROUPED, head_dim=8),
    "olmoe": OlmoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2),
    "granitemoe": GraniteMoeConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": Qwen2MoeConfig(
        **GROUPED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    "glm4_moe": Glm4MoeConfig(
        **GROUPED,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
}
FAST = ("falcon-grouped", "gpt2", "gptj", "gpt_neox", "gpt_oss", "opt", "exaone4", "mixtral")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save_random(CASES[name], tmp_path)
    model = load(tmp_path, model_impl="transformers")
    assert isinstance(model, TransformersLM)
    check_all_schedules(model, reference)


@pytest.mark.parametrize("name", ["llama-tied-biases", "qwen2", "qwen3", "mistral", "granite", "llama-dynamic"])
def test_native_families_are_served_by_both_routes(name: str, tmp_path: Path) -> None:
    reference = save_random({**NATIVE_CASES, **VARIANTS}[name], tmp_path)
    model = load(tmp_path, model_impl="transformers")
    assert isinstance(model, TransformersLM)
    check_all_schedules(model, reference)


def test_the_page_of_models_lists_what_is_tested_here() -> None:
    tested = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] for config in CASES.values()}
    assert tested - NATIVE.keys() == GENERIC.keys()


def test_falcons_own_linear_layers_are_quantized_as_well(tmp_path: Path) -> None:
    save_random(CASES["falcon-grouped"], tmp_path)
    assert load(tmp_path, quantization="int8").weight_bytes() < 0.6 * load(tmp_path).weight_bytes()


@pytest.mark.parametrize("architecture", SERVED)
def test_experts_are_quantized_as_well(architecture: str, tmp_path: Path) -> None:
    name = next(name for name, config in CASES.items() if config.model_type == architecture)
    reference = save_random(CASES[name], tmp_path)
    model, plain = (load(tmp_path, model_impl="transformers", quantization=kind) for kind in ("int8", None))
    mixtures = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    assert mixtures
    assert model.weight_bytes() < 0.6 * plain.weight_bytes()
    check_all_schedules(plain, reference, length=45)
