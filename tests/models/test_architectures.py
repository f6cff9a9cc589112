"""The long tier: every causal language model of the installed transformers is served right or refused, never wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import check_all_schedules, load, save_random
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.errors import UnsupportedModelError

# The names that configurations use for the same few sizes.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "is_decoder": True,
    "logit_scale": 1.0,
    "multi_query": False,
    "query_pre_attn_scalar": 8,
    "sliding_window": 20,
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"], 32),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "d_ff"], 48),
    **dict.fromkeys(["decoder_ffn_dim", "encoder_ffn_dim"], 48),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 24),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "num_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["head_dim"], 8),
    **dict.fromkeys(["rotary_dim"], 4),
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 128),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk"], 2),
    **dict.fromkeys(["n_group", "topk_group"], 1),
}


def small_config(model_type: str) -> Any:
    """A configuration of two layers, one of each kind; a skip where the defaults cannot be made small."""
    cls = CONFIG_MAPPING[model_type]
    try:
        default = cls()
        if any(isinstance(value, PreTrainedConfig) for value in vars(default).values()):
            pytest.skip("made of several models")
        sizes = {name: value for name, value in SIZES.items() if hasattr(default, name)}
        heads = getattr(default, "num_attention_heads", None)
        if hasattr(default, "num_key_value_heads"):
            sizes["num_key_value_heads"] = 4 if default.num_key_value_heads == heads else 2
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(default, name, None):
                sizes[name] = (list(dict.fromkeys(getattr(default, name))) * 2)[:2]
        return cls(**sizes)
    except Exception as error:
        pytest.skip(f"no small configuration: {error}")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_served_right_or_refused(model_type: str, tmp_path: Path) -> None:
    config = small_config(model_type)
    try:
        reference = save_random(config, tmp_path)
    except Exception as error:
        pytest.skip(f"transformers cannot build or save this configuration: {error}")
    refusal = ""
    try:
        model = load(tmp_path, model_impl="transformers")
    except UnsupportedModelError as error:
        refusal = str(error)
    if refusal:
        assert type(reference).__name__ in refusal
    else:
        check_all_schedules(model, reference)
