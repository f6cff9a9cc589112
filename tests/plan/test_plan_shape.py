"""Parameters and KV layers from a configuration, against transformers' own modules."""

from __future__ import annotations

import pytest

from octavo.errors import UnsupportedModelError, UserError
from octavo.plan.kv import plan_kv
from octavo.plan.presets import PRESETS
from octavo.plan.shape import kv_layers, parameters

SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 160,
    "head_dim": 8,
}


def _count(config) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    unique = {id(p): p.numel() for p in model.parameters()}
    return sum(unique.values())


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("granite", {}),
        ("phi3", {}),
        ("smollm3", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("olmo2", {}),
        ("gemma", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 2}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
        ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}),
    ],
)
def test_parameters_equal_those_of_transformers(family, extra, is_tied):
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **SMALL, **extra, tie_word_embeddings=is_tied, pad_token_id=0)
    assert parameters(config.to_dict()).total == _count(config)


def test_llama_4_with_its_vision_tower_equals_transformers():
    import torch
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    preset = PRESETS["llama-4-scout"]
    text = {**preset["text_config"], "pad_token_id": 0}
    config = Llama4Config(text_config=text, vision_config=preset["vision_config"], tie_word_embeddings=False)
    with torch.device("meta"):
        model = Llama4ForConditionalGeneration(config)
    assert parameters(preset).total == sum(p.numel() for p in model.parameters())
    assert parameters(preset).active == pytest.approx(17e9, rel=0.02)


def test_windows_stop_growing():
    gemma = {**SMALL, "model_type": "gemma2", "sliding_window": 16}
    assert [layer.window for layer in kv_layers(gemma)] == [16, None, 16, None]
    plan = plan_kv(gemma, [8, 1000])
    each = 2 * 2 * 8 * 2
    assert plan.rows[0].bytes_per_request == 4 * 8 * each
    assert plan.rows[1].bytes_per_request == (2 * 16 + 2 * 1000) * each


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, [32] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}, [None] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3},
            [None] * 3 + [32],
        ),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, [64, 64, 64, None]),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8}, [None, 8, None, 8]),
    ],
)
def test_which_layers_have_a_window(config, windows):
    assert [layer.window for layer in kv_layers({**SMALL, **config})] == windows


def test_latent_attention_stores_one_vector():
    config = {**SMALL, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert plan_kv(config, [10]).bytes_per_token == 4 * 576 * 2


@pytest.mark.parametrize(("dtype", "factor"), [("fp8", 1), ("int8", 1), ("bfloat16", 2), ("float32", 4), ("auto", 4)])
def test_kv_dtype(dtype, factor):
    config = {**SMALL, "torch_dtype": "float32"}
    assert plan_kv(config, [1], kv_cache_dtype=dtype).bytes_per_token == 4 * 2 * 2 * 8 * factor


def test_errors_name_the_field():
    with pytest.raises(UserError, match=r"num_hidden_layers is 'x'"):
        kv_layers({**SMALL, "num_hidden_layers": "x"})
    with pytest.raises(UserError, match="no num_attention_heads"):
        kv_layers({"num_hidden_layers": 2})
    with pytest.raises(UserError, match="layer_types has 1 entries for 4 layers"):
        kv_layers({**SMALL, "layer_types": ["full_attention"]})
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*--params"):
        parameters({**SMALL, "model_type": "mamba"})
    with pytest.raises(UserError, match="at least 1"):
        plan_kv(SMALL, [0])
