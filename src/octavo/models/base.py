"""What the engine may rely on, whichever way a model is written."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from octavo.core.cache_groups import KVCacheSpec
from octavo.layers.attention import PagedLayer
from octavo.layers.layer import weight_bytes
from octavo.layers.step import StepInputs
from octavo.ops import KVCache


class CausalLM(nn.Module):
    """A causal language model over the paged KV cache.

    The tokens of a step come as one packed row: those of all requests one after the other, with their positions, while
    `StepInputs` says which tokens belong together and where their keys and values are kept.

    Attributes:
        vocab_size: rows of the output layer.
        max_position: positions that the model was made for.
        hidden_size: size of a hidden row.
    """

    vocab_size: int
    max_position: int
    hidden_size: int

    @abstractmethod
    def attention_layers(self) -> Sequence[PagedLayer]:
        """The attention of every layer, in layer order."""

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, step: StepInputs) -> Tensor:
        """`input_ids` and `positions` int64 [T] -> hidden rows [T, H] after the last norm."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [R, H] -> logits [R, vocab_size], float32, before any sampling parameter."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of activations and of the KV cache."""

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """What each layer keeps of a token, in layer order; `window` counts the tokens a query sees, with its own."""
        return [
            KVCacheSpec(
                kind="full" if layer.window is None else "sliding",
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                window=layer.window,
                bytes_per_element=self.dtype.itemsize,
                shares_values=layer.shares_values,
            )
            for layer in self.attention_layers()
        ]

    def bind_kv_cache(self, caches: Sequence[KVCache], groups: Sequence[int]) -> None:
        """Gives every layer its cache and the index of its group in `StepInputs.metadata`, both in layer order."""
        for layer, cache, group in zip(self.attention_layers(), caches, groups, strict=True):
            layer.bind(cache, group)

    def weight_bytes(self) -> int:
        """Bytes of the weights as they are kept in memory."""
        return weight_bytes(self)
