"""Memory of the KV cache: 2 x layers x KV heads x head size x bytes, a token.

The 2 is K and V. Layers with a sliding window or chunked attention stop growing at the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.errors import UserError
from octavo.plan.shape import Config, KVLayer, geometry, kv_layers, text_config

KV_DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}


@dataclass(frozen=True)
class KVRow:
    """One context length: bytes of one request, and of all of them."""

    tokens: int
    bytes_per_request: int
    bytes_total: int


@dataclass(frozen=True)
class KVPlan:
    """What a model's KV cache needs."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    dtype_bytes: int
    bytes_per_token: int  # of a token that every layer keeps
    bytes_per_token_full: int  # of a token beyond every window: what grows for ever
    windowed_layers: int
    is_latent: bool
    requests: int
    rows: tuple[KVRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def kv_dtype(config: Config, name: str = "auto") -> tuple[str, int]:
    """The element type of the cache and its bytes; `auto` is the checkpoint's own type."""
    if name == "auto":
        text = text_config(config)
        name = str(text.get("torch_dtype") or text.get("dtype") or "bfloat16").removeprefix("torch.")
    if name not in KV_DTYPE_BYTES:
        raise UserError(
            f"--kv-cache-dtype {name!r} is none of auto, {', '.join(KV_DTYPE_BYTES)}", param="kv_cache_dtype"
        )
    return name, KV_DTYPE_BYTES[name]


def request_bytes(layers: Sequence[KVLayer], tokens: int, dtype_bytes: int) -> int:
    """KV bytes of one request whose context has `tokens` tokens."""
    held = (layer.elements * min(tokens, layer.window or tokens) for layer in layers)
    return dtype_bytes * sum(held)


def plan_kv(config: Config, tokens: Sequence[int], requests: int = 1, kv_cache_dtype: str = "auto") -> KVPlan:
    """The table of `octavo plan kv`; UserError for lengths or counts under 1."""
    for value in (*tokens, requests):
        if value < 1:
            raise UserError(f"{value} is too few: tokens and requests are at least 1", param="tokens")
    g = geometry(config)
    layers = kv_layers(config)
    name, width = kv_dtype(config, kv_cache_dtype)
    rows = tuple(KVRow(n, one := request_bytes(layers, n, width), one * requests) for n in tokens)
    return KVPlan(
        layers=g.layers,
        kv_heads=g.kv_heads,
        head_dim=g.head_dim,
        dtype=name,
        dtype_bytes=width,
        bytes_per_token=width * sum(layer.elements for layer in layers),
        bytes_per_token_full=width * sum(layer.elements for layer in layers if layer.window is None),
        windowed_layers=sum(layer.window is not None for layer in layers),
        is_latent=bool(text_config(config).get("kv_lora_rank")),
        requests=requests,
        rows=rows,
    )
