"""Attention over the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from octavo import ops
from octavo.layers.layer import Layer
from octavo.layers.step import StepInputs
from octavo.ops import KVCache


class PagedLayer(Layer):
    """What the engine knows of a layer's attention: its shape, and the pages that it bound to it.

    `window` counts the tokens that a query may see, itself included. `cache` and `group` (the index of the layer's
    metadata in `StepInputs`) are bound by the engine after loading.
    """

    cache: KVCache
    group: int
    shares_values = False  # whether the values are columns of the keys, which are then stored alone

    def __init__(
        self,
        layer_index: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.softcap = softcap

    def bind(self, cache: KVCache, group: int) -> None:
        """Gives the layer its pages and the group whose block table describes them."""
        self.cache = cache
        self.group = group

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, window={self.window}"


class Attention(PagedLayer):
    """Causal attention of one layer with grouped KV heads, over its pages."""

    def forward(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        step: StepInputs,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Rotates, stores and attends: `qkv` [T, (Hq + 2 Hkv) D] with `positions` int64 [T] -> [T, Hq D].

        `q_norm` and `k_norm` [D] normalize each head before the rotation (Qwen3).
        """
        meta = step.metadata[self.group]
        q = ops.rotary_and_store(
            qkv,
            positions,
            cos_sin,
            self.cache,
            meta,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            q_norm,
            k_norm,
            eps,
        )
        return ops.paged_attention(q, self.cache, meta, self.scale, self.window, self.softcap)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: StepInputs, sinks: Tensor | None = None) -> Tensor:
        """Stores and attends, for callers that rotate themselves: `q` [T, Hq, D], `k` and `v` [T, Hkv, D] -> [T, Hq D].

        `sinks` [Hq] are logits that take part in the softmax without a value.
        """
        meta = step.metadata[self.group]
        ops.store_kv(k, v, self.cache, meta)
        return ops.paged_attention(q, self.cache, meta, self.scale, self.window, self.softcap, sinks)
