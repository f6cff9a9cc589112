"""DeepSeek-V2 and V3: latent attention, dense layers first, then routed experts with shared ones beside them."""

from __future__ import annotations

import math
from typing import Any

from octavo.layers.experts import ExpertsConfig, Routing
from octavo.layers.latent_attention import LatentConfig
from octavo.layers.rotary import RopeConfig
from octavo.models.decoder_config import DecoderConfig, common_fields, required


def deepseek_v2_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a DeepseekV2ForCausalLM: softmax routing, and rotary elements in pairs."""
    method = config.get("topk_method") or "greedy"
    grouped = method == "group_limited_greedy"
    routing = Routing(
        config.get("n_routed_experts", 64),
        required(config, "num_experts_per_tok"),
        scaling=float(config.get("routed_scaling_factor", 1.0)),
        num_groups=required(config, "n_group") if grouped else 1,
        top_groups=required(config, "topk_group") if grouped else 1,
    )
    reason = _differs(config, {"topk_method": ("greedy", "group_limited_greedy"), "scoring_func": ("softmax",)})
    if reason is None and config.get("norm_topk_prob"):
        reason = "norm_topk_prob is true, which DeepSeek's own code reads for V2 and transformers does not"
    return _decoder(config, routing, True, bool(config.get("mlp_bias", False)), 0, reason)


def deepseek_v3_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a DeepseekV3ForCausalLM: sigmoid scores, and a bias that balances the experts."""
    routing = Routing(
        config.get("n_routed_experts", 256),
        config.get("num_experts_per_tok", 8),
        scoring="sigmoid",
        normalizes=bool(config.get("norm_topk_prob", True)),
        scaling=float(config.get("routed_scaling_factor", 2.5)),
        num_groups=config.get("n_group") or 1,
        top_groups=config.get("topk_group") or 1,
        group_score="two largest",
        has_bias=True,
    )
    reason = _differs(config, {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)})
    return _decoder(config, routing, bool(config.get("rope_interleave", True)), False, 3, reason)


def _decoder(
    config: dict[str, Any], routing: Routing, interleaved: bool, mlp_bias: bool, dense_default: int, reason: str | None
) -> DecoderConfig:
    latent = LatentConfig(
        kv_rank=config.get("kv_lora_rank", 512),
        q_rank=config.get("q_lora_rank", 1536),
        content_dim=config.get("qk_nope_head_dim", 128),
        rotary_dim=config.get("qk_rope_head_dim", 64),
        value_dim=config.get("v_head_dim", 128),
        interleaved=interleaved,
    )
    fields = common_fields({**config, "head_dim": latent.rotary_dim})
    first = config.get("first_k_dense_replace", dense_default)
    inner = required(config, "moe_intermediate_size")
    shared = inner * (config.get("n_shared_experts") or 0)
    layers = tuple(index >= first for index in range(fields["num_layers"]))
    heads = fields["num_heads"]
    reason = reason or _differs(config, {"moe_layer_freq": (1,), "num_key_value_heads": (heads,)})
    return DecoderConfig(
        **{**fields, "num_kv_heads": 1},
        output_bias=bool(config.get("attention_bias", False)),
        mlp_bias=mlp_bias,
        attention_scale=_scale(latent, fields["rope"]),
        latent=latent,
        experts=ExpertsConfig(routing, inner, layers, shared),
        refused=reason,
    )


def _scale(latent: LatentConfig, rope: RopeConfig) -> float:
    """The softmax's scale: by the size of a head, and YaRN's temperature, which queries and keys both have."""
    scale = float((latent.content_dim + latent.rotary_dim) ** -0.5)
    weight = rope.scaling.get("mscale_all_dim") if rope.rope_type != "default" else None
    factor = rope.scaling.get("factor", 1.0)
    if not weight or factor <= 1:
        return scale
    return scale * float(0.1 * weight * math.log(factor) + 1.0) ** 2


def _differs(config: dict[str, Any], served: dict[str, tuple[Any, ...]]) -> str | None:
    """Which field has a value that is not served, or None; a field that is left out has a served one."""
    for field, values in served.items():
        value = config.get(field)
        if value is not None and value not in values:
            return f"{field} {value!r} is not {' or '.join(repr(known) for known in values)}"
    return None
