"""Multi-head latent attention (DeepSeek-V2, section 2.1): one small row a token in the cache, whatever the heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import ops
from octavo.checkpoint.base import dense
from octavo.layers.attention import PagedLayer
from octavo.layers.layer import Block
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.step import StepInputs
from octavo.layers.weights import WeightSource

_NORM_EPS = 1e-6  # of the norms inside attention, whatever the model's own


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of latent attention.

    Attributes:
        kv_rank: elements of the latent that stands for keys and values.
        q_rank: elements of the latent that queries come from, or None where they come from the hidden row.
        content_dim: elements of a head's query and key that do not turn.
        rotary_dim: elements that do; all heads share that part of the key.
        value_dim: elements of a head's value.
        interleaved: whether neighbouring elements turn together.
    """

    kv_rank: int
    q_rank: int | None
    content_dim: int
    rotary_dim: int
    value_dim: int
    interleaved: bool


class LatentPages(PagedLayer):
    """Attention over the pages of latent rows that the engine bound to it."""

    shares_values = True

    def __init__(self, layer_index: int, num_heads: int, row_size: int, scale: float) -> None:
        super().__init__(layer_index, num_heads, 1, row_size, scale)

    def forward(
        self,
        q_content: Tensor,
        q_rotary: Tensor,
        latent: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        step: StepInputs,
        norm: RMSNorm,
        interleaved: bool,
    ) -> Tensor:
        """`q_content` [T, H, R] in the latent space, `q_rotary` [T, H, P], `latent` [T, R + P] -> [T, H, R]."""
        meta = step.metadata[self.group]
        rotated = ops.latent_rotary_and_store(
            q_rotary, latent, positions, cos_sin, self.cache, meta, norm.weight, norm.eps, interleaved
        )
        return ops.latent_attention(
            torch.cat((q_content, rotated), dim=2), self.cache, meta, self.scale, norm.weight.shape[0]
        )


class LatentSelfAttention(Block):
    """Projections around `LatentPages`.

    The product of a head's latent with its key weights is moved to the query, and that with its value weights behind
    the attention, so that the cache is read as it is. Both weights are kept dense.
    """

    def __init__(
        self,
        index: int,
        config: LatentConfig,
        hidden: int,
        num_heads: int,
        scale: float,
        bias: bool,
        source: WeightSource,
        prefix: str,
    ) -> None:
        self.config, self.num_heads = config, num_heads
        rank, row = config.kv_rank, config.kv_rank + config.rotary_dim
        q_size = num_heads * (config.content_dim + config.rotary_dim)
        if config.q_rank is None:
            self.q_down, self.q_norm, q_in, q_name = None, None, hidden, f"{prefix}.q_proj"
        else:
            self.q_down = Linear.load(source, [f"{prefix}.q_a_proj"], hidden, [config.q_rank], bias)
            self.q_norm = RMSNorm(source.tensor(f"{prefix}.q_a_layernorm.weight", (config.q_rank,)), _NORM_EPS)
            q_in, q_name = config.q_rank, f"{prefix}.q_b_proj"
        self.q_up = Linear.load(source, [q_name], q_in, [q_size], False)
        self.kv_down = Linear.load(source, [f"{prefix}.kv_a_proj_with_mqa"], hidden, [row], bias)
        self.kv_norm = RMSNorm(source.tensor(f"{prefix}.kv_a_layernorm.weight", (rank,)), _NORM_EPS)
        rows = num_heads * (config.content_dim + config.value_dim)
        up = dense(source.weight_as_stored(f"{prefix}.kv_b_proj", (rows, rank)), source.dtype)
        key_up, value_up = up.unflatten(0, (num_heads, -1)).split((config.content_dim, config.value_dim), dim=1)
        self.key_up, self.value_up = key_up.contiguous(), value_up.mT.contiguous()
        self.output = Linear.load(source, [f"{prefix}.o_proj"], num_heads * config.value_dim, [hidden], bias)
        self.attend = LatentPages(index, num_heads, row, scale)

    def __call__(self, x: Tensor, positions: Tensor, cos_sin: Tensor, step: StepInputs) -> Tensor:
        config = self.config
        if self.q_down is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(self.q_down(x)))
        else:
            q = self.q_up(x)
        content, rotary = q.unflatten(1, (self.num_heads, -1)).split((config.content_dim, config.rotary_dim), dim=2)
        content = torch.bmm(content.transpose(0, 1), self.key_up).transpose(0, 1)
        attended = self.attend(
            content, rotary, self.kv_down(x), positions, cos_sin, step, self.kv_norm, config.interleaved
        )
        values = torch.bmm(attended.transpose(0, 1), self.value_up).transpose(0, 1)
        return self.output(values.flatten(1))
