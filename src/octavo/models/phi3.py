"""Phi-3 and Phi-4: Llama with merged projections in the checkpoint, LongRoPE, and heads that turn in part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.models.decoder_config import DecoderConfig, LayerNames, common_fields


def phi3_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a Phi3ForCausalLM; older files call LongRoPE "su" or "yarn"."""
    fields = common_fields({"rms_norm_eps": 1e-5, **config})
    if fields["rope"].rope_type in ("su", "yarn"):
        fields["rope"] = replace(fields["rope"], rope_type="longrope")
    rope_type = fields["rope"].rope_type
    known = rope_type in ("default", "longrope")
    refused = None if known else f"rope_type {rope_type!r} is neither default nor longrope"
    fields["windows"] = (config.get("sliding_window"),) * fields["num_layers"]
    names = LayerNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
    return DecoderConfig(**fields, names=names, partial_rotary=True, refused=refused)
