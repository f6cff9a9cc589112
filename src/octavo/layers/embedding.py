"""Token embedding and output layer, which share one packed weight where the model ties them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo import ops
from octavo.layers.layer import Layer
from octavo.layers.weights import Weight
from octavo.ops import PackedWeight


class Embedding(Layer):
    """Rows of a [vocabulary, hidden] weight: dense, quantized, or packed (shared with the output layer)."""

    def __init__(self, weight: Weight | PackedWeight, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.dtype = dtype
        self.table = weight.to(device=device, dtype=dtype) if isinstance(weight, Tensor) else weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """`input_ids` int64 [T] -> [T, H]."""
        if isinstance(self.table, Tensor):
            return nn.functional.embedding(input_ids, self.table)
        return self.table.rows(input_ids, self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class OutputLayer(Layer):
    """Logits [..., vocabulary] in float32 from hidden rows [..., H]."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packed = packed
        self.bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
        logits = ops.linear(rows, self.packed, self.bias, torch.float32)
        return logits if hidden.dim() == 2 else logits.view(*hidden.shape[:-1], -1)

    def extra_repr(self) -> str:
        return self.packed.describe()


def embedding_and_output(
    embedding: Weight,
    output: Weight | None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    deterministic: bool = False,
) -> tuple[Embedding, OutputLayer]:
    """Builds both layers; `output` None ties them, so that one packed weight serves both."""
    if output is None:
        packed = ops.pack_weight(embedding, dtype, device, deterministic)
        return Embedding(packed, dtype, device), OutputLayer(packed)
    return Embedding(embedding, dtype, device), OutputLayer(ops.pack_weight(output, dtype, device, deterministic))
