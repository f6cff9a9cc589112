"""The decoder that the Llama family and its relatives share: pre-norm blocks of attention and a gated feed-forward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.layers.activation import gated_activation
from octavo.layers.attention import Attention, PagedLayer
from octavo.layers.embedding import embedding_and_output
from octavo.layers.experts import ExpertNames, Experts, ExpertsConfig
from octavo.layers.latent_attention import LatentSelfAttention
from octavo.layers.layer import Block
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import cos_sin_table
from octavo.layers.step import StepInputs
from octavo.layers.weights import Weight, WeightSource
from octavo.models.base import CausalLM
from octavo.models.decoder_config import DecoderConfig
from octavo.models.fusion import fuse_layers


class DecoderLayer(Block):
    """One block: norm, attention, norm, feed-forward, with the residual carried beside."""

    def __init__(self, index: int, config: DecoderConfig, source: WeightSource) -> None:
        prefix = f"model.layers.{index}"
        self.residual_multiplier = config.residual_multiplier
        self.input_norm = load_norm(source, f"{prefix}.input_layernorm", config)
        self.attention = self_attention(index, config, source, f"{prefix}.self_attn")
        self.post_norm = load_norm(source, f"{prefix}.post_attention_layernorm", config)
        self.mlp = feed_forward(index, config, source, prefix)

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cos_sin: Tensor, step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """`x` [T, H] is what the block before added; returns this block's own and the residual without it."""
        if residual is None:
            residual = x
            x = self.input_norm(x)
        else:
            x = self.input_norm(x, residual)
        x = self._scaled(self.attention(x, positions, cos_sin, step))
        x = self.post_norm(x, residual)
        return self._scaled(self.mlp(x)), residual

    @property
    def is_merged(self) -> bool:
        """Whether it is dense and each product has one packed weight and nothing else.

        Projections in different formats stay apart, and some checkpoints rotate the rows of a layer at run time.
        """
        if not (isinstance(self.attention, SelfAttention) and isinstance(self.mlp, GatedMLP)):
            return False
        linears = (self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down)
        return all(len(linear.packed) == 1 and linear.rotations is None for linear in linears)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_multiplier == 1.0 else x * self.residual_multiplier


class SelfAttention(Block):
    """Merged q, k, v projection, attention over the pages, output projection."""

    def __init__(self, index: int, config: DecoderConfig, source: WeightSource, prefix: str) -> None:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = [f"{prefix}.{part}" for part in config.names.qkv]
        sizes = merged_sizes([q_size, kv_size, kv_size], names)
        self.qkv = Linear.load(source, names, config.hidden_size, sizes, config.qkv_bias)
        self.output = Linear.load(source, [f"{prefix}.o_proj"], q_size, [config.hidden_size], config.output_bias)
        scale = config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5
        window = config.windows[index]
        self.attend = Attention(
            index, config.num_heads, config.num_kv_heads, config.head_dim, scale, window, config.softcap
        )
        self.eps = config.eps
        norms = [f"{prefix}.{part}_norm.weight" for part in "qk"]
        self.q_norm, self.k_norm = (
            norm_weight(source, name, config.head_dim, config.norm_offset) if config.qk_norm else None for name in norms
        )

    def __call__(self, x: Tensor, positions: Tensor, cos_sin: Tensor, step: StepInputs) -> Tensor:
        attended = self.attend(self.qkv(x), positions, cos_sin, step, self.q_norm, self.k_norm, self.eps)
        return self.output(attended)


def self_attention(
    index: int, config: DecoderConfig, source: WeightSource, prefix: str
) -> SelfAttention | LatentSelfAttention:
    """The attention of the layer of this index: over keys and values, or over latents."""
    if config.latent is None or config.attention_scale is None:
        return SelfAttention(index, config, source, prefix)
    sizes = (config.hidden_size, config.num_heads, config.attention_scale, config.output_bias)
    return LatentSelfAttention(index, config.latent, *sizes, source, prefix)


class GatedMLP(Block):
    """`down(activation(gate(x)) * up(x))` with gate and up in one product."""

    def __init__(self, config: DecoderConfig, source: WeightSource, prefix: str, inner: int) -> None:
        hidden, bias = config.hidden_size, config.mlp_bias
        names = [f"{prefix}.{part}" for part in config.names.gate_up]
        self.gate_up = Linear.load(source, names, hidden, merged_sizes([inner, inner], names), bias)
        self.down = Linear.load(source, [f"{prefix}.{config.names.down}"], inner, [hidden], bias)
        self.activation = gated_activation(config.activation)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)))


class MixtureMLP(Block):
    """Routed experts, and beside them one that every token passes where the model has it."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, source: WeightSource, layer: str) -> None:
        names = expert_names(source, layer)
        self.routed = Experts(experts, config.hidden_size, config.activation, source, names)
        shared = f"{names.module}.shared_experts"
        self.shared = GatedMLP(config, source, shared, experts.shared_size) if experts.shared_size else None

    def __call__(self, x: Tensor) -> Tensor:
        routed = self.routed(x)
        return routed if self.shared is None else routed + self.shared(x)


def feed_forward(index: int, config: DecoderConfig, source: WeightSource, layer: str) -> GatedMLP | MixtureMLP:
    """What follows attention in the layer of this index and module name."""
    if config.experts is not None and config.experts.layers[index]:
        return MixtureMLP(config, config.experts, source, layer)
    return GatedMLP(config, source, f"{layer}.{config.names.mlp}", config.intermediate_size)


def expert_names(source: WeightSource, layer: str) -> ExpertNames:
    """The names of a mixture: Mixtral's own, those that all others have, or LLM Compressor's blend for Mixtral."""
    mixtral = f"{layer}.block_sparse_moe"
    if f"{mixtral}.gate.weight" not in source.checkpoint:
        return ExpertNames(f"{layer}.mlp")
    own = ExpertNames(mixtral, "w1", "w3", "w2")
    return own if f"{mixtral}.experts.0.{own.gate}.weight" in source.checkpoint else ExpertNames(mixtral)


class DecoderLM(CausalLM):
    """The whole model. Its weights are read while it is built, each checked against `config`.

    Args:
        config: the family's reading of `config.json`.
        source: where the weights come from, and the dtype and device they go to.
        max_position: length of the rotary table, when less than the model's own maximum is served.
    """

    def __init__(self, config: DecoderConfig, source: WeightSource, max_position: int | None = None) -> None:
        super().__init__()
        self.max_position = min(config.max_position, max_position or config.max_position)
        # A window that no sequence exceeds is full attention, and then shares its cache group.
        windows = tuple(None if window and window >= self.max_position else window for window in config.windows)
        self.config = config = replace(config, windows=windows)
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self._dtype = source.dtype
        shape = (config.vocab_size, config.hidden_size)
        embedding = source.embedding("model.embed_tokens", shape)
        output = output_weight(source, config, embedding)
        self.embedding, self.output = embedding_and_output(
            embedding, output, source.dtype, source.device, source.deterministic
        )
        build = config.block or DecoderLayer
        self.layers = [build(index, config, source) for index in range(config.num_layers)]
        self.norm = load_norm(source, "model.norm", config)
        self.cos_sin = cos_sin_table(config.rope, self.max_position, source.device)
        self.tables = [self.cos_sin] * config.num_layers
        if config.local_rope is not None:
            local = cos_sin_table(config.local_rope, self.max_position, source.device)
            self.tables = [local if is_local else self.cos_sin for is_local in config.local_layers]
        self.embedding_multiplier = config.embedding_multiplier
        if config.rounds_multiplier:
            self.embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=source.dtype).item()
        # What is fused is chosen by the number of rows.
        self._fused = None if source.deterministic else fuse_layers(self.layers, config)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def attention_layers(self) -> list[PagedLayer]:
        return [layer.attention.attend for layer in self.layers]

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepInputs) -> Tensor:
        x = self.embedding(input_ids)
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        if self._fused is not None:
            attentions = self.attention_layers()
            metadata = [step.metadata[attention.group] for attention in attentions]
            done = self._fused(x, positions, self.cos_sin, [attention.cache for attention in attentions], metadata)
            if done is not None:
                return self.norm(*done)
        residual: Tensor | None = None
        for layer, cos_sin in zip(self.layers, self.tables, strict=True):
            x, residual = layer(x, residual, positions, cos_sin, step)
        return self.norm(x, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits, cap = self.output(hidden), self.config.logits_softcap
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        return logits if cap is None else cap * torch.tanh(logits / cap)


def output_weight(source: WeightSource, config: DecoderConfig, embedding: Weight) -> Weight | None:
    """The weight [vocabulary, hidden] of the output layer; None where it is the embedding's.

    A checkpoint with different values for both is not tied, whatever its configuration says (as in transformers 5).
    """
    if config.tie_embeddings and "lm_head.weight" not in source.checkpoint:
        return None
    output = source.embedding("lm_head", (config.vocab_size, config.hidden_size))
    if not (config.tie_embeddings and isinstance(embedding, Tensor) and isinstance(output, Tensor)):
        return output
    return None if torch.equal(embedding, output) else output


def load_norm(source: WeightSource, module: str, config: DecoderConfig) -> RMSNorm:
    """The norm of hidden rows that a checkpoint has under this module name."""
    weight = norm_weight(source, f"{module}.weight", config.hidden_size, config.norm_offset)
    return RMSNorm(weight, config.eps, source.deterministic)


def norm_weight(source: WeightSource, name: str, size: int, offset: float) -> Tensor:
    """A norm's weight plus `offset`, added in float32 and rounded once."""
    if offset == 0.0:
        return source.tensor(name, (size,))
    return (source.tensor(name, (size,), torch.float32) + offset).to(source.dtype)


def merged_sizes(sizes: list[int], names: list[str]) -> list[int]:
    """Rows of each tensor in the checkpoint, which keeps projections of these sizes apart or all in one."""
    return sizes if len(names) == len(sizes) else [sum(sizes)]
