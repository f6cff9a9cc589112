"""Gemma 3 (text): Gemma 2's blocks with normalized query and key heads, and two rotary bases: local and global."""

from __future__ import annotations

from typing import Any

from octavo.layers.rotary import RopeConfig
from octavo.models.decoder_config import DecoderConfig, required
from octavo.models.gemma2 import gemma_decoder
from octavo.models.layer_kinds import SLIDING, every_nth_full, layer_kinds


def gemma3_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a Gemma3ForCausalLM. Its code reads no soft cap of attention scores."""
    layers = required(config, "num_hidden_layers")
    kinds = layer_kinds(config, layers, every_nth_full(layers, config.get("sliding_window_pattern") or 6))
    full, sliding = _rope_settings(config)
    head_dim, longest = config.get("head_dim") or 256, required(config, "max_position_embeddings")
    local = RopeConfig.from_config(sliding, head_dim, longest)
    is_local = tuple(kind == SLIDING for kind in kinds)
    given = {**config, **full}
    return gemma_decoder(given, kinds, qk_norm=True, local_rope=local, local_layers=is_local)


def _rope_settings(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary fields of the full and of the sliding layers, in the form of a configuration with one kind only."""
    by_kind = config.get("rope_parameters") or {}
    full = dict(by_kind.get("full_attention") or config.get("rope_scaling") or {})
    sliding = dict(by_kind.get("sliding_attention") or {})
    full.setdefault("rope_theta", config.get("rope_theta") or 1_000_000.0)
    sliding.setdefault("rope_theta", config.get("rope_local_base_freq") or 10_000.0)
    return {"rope_parameters": full}, {"rope_parameters": sliding}
