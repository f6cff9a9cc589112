"""A stack of decoder layers as one operation, for devices where the calls between its parts cost more than they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo.ops.cpu import decoder as cpu_decoder
from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.packed_weight import PackedWeight
from octavo.ops.triton import decoder as triton_decoder


@dataclass(frozen=True)
class DecoderLayer:
    """The weights and constants of one pre-norm layer: attention with rotary embedding, then a gated feed-forward.

    qkv: [(Hq + 2 Hkv) D, H]; output: [H, Hq D]; gate_up: [2 I, H]; down: [H, I]; biases [N] or None.
    input_norm, post_norm: [H]; q_norm, k_norm: [D] or None. activation: "silu" or "gelu_tanh".
    """

    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    input_norm: Tensor
    post_norm: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    activation: str = "silu"
    window: int | None = None
    softcap: float | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    head_eps: float = 1e-6
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


FusedDecoder = Callable[
    [Tensor, Tensor, Tensor, Sequence[KVCache], Sequence[AttentionMetadata]], tuple[Tensor, Tensor] | None
]


def fuse_decoder(layers: Sequence[DecoderLayer]) -> FusedDecoder | None:
    """A function that runs all layers, or None where no kernel does and single operations must be called.

    `fused(x, positions, cos_sin, caches, metadata)` takes the embeddings x [T, H] (which it overwrites), positions
    int64 [T], the rotary table (`rotary_and_store`), and a cache and the metadata of its group for each layer. It
    returns (x, residual) for the final norm, or None where it does not serve these caches; then nothing was changed.
    """
    for candidate in (cpu_decoder, triton_decoder):
        if candidate.rejects(layers) is None:
            return candidate.fuse(layers)
    return None
