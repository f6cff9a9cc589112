"""Falcon on the generic route: its modules compute attention themselves, so they get a class that calls ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def adapt_falcon(implementation: str, attention: Callable[..., tuple[Tensor, None]]) -> bool:
    """Gives transformers' Falcon an attention class of this name, which calls `attention` as others' modules do.

    False where this version of transformers chooses the class in another way. Models with ALiBi are not served.
    """
    from transformers.models.falcon import modeling_falcon as falcon

    classes = getattr(falcon, "FALCON_ATTENTION_CLASSES", None)
    if classes is None:
        return False

    class PagedFalconAttention(falcon.FalconAttention):
        def forward(  # type: ignore[override]
            self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any
        ) -> tuple[Tensor, None]:
            """Each key head is stored after the queries that share it, and before its value: [1, T, Hkv, G + 2, D]."""
            grouped = self.query_key_value(hidden_states).unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
            parts = (grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :])
            query, key, value = (part.transpose(1, 2) for part in parts)
            query, key = falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
            attended, _nothing = attention(self, query, key, value, None, scaling=self.inv_norm_factor)
            return self.dense(attended.flatten(2)), None

    classes[implementation] = PagedFalconAttention
    return True
