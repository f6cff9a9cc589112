"""Rotated models compute what they did before, and models that a rotation would change are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model, token_samples
from torch import Tensor, nn

from octavo.compress.blocks import Blocks, find_blocks
from octavo.compress.loaded_source import LoadedSource
from octavo.compress.modifiers.base import Transform
from octavo.compress.modifiers.quip import QuIPModifier
from octavo.compress.modifiers.spinquant import SpinQuantModifier
from octavo.compress.residual import norm_offset
from octavo.errors import UnsupportedModelError, UserError

IDS = torch.tensor(token_samples(2, 16, seed=7))


def randomized(family: str, **changes: Any) -> Any:
    """A tiny model whose norms and biases are no ones and zeros."""
    model = tiny_model(family, pad_token_id=0, **changes)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                draw = torch.rand(parameter.shape, generator=generator)
                parameter.copy_(draw - 0.5 if name.endswith("bias") else draw + 0.5)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


@torch.no_grad()
def transform(model: Any, modifier: Transform) -> list[str]:
    """What the pipeline does with a transform that needs no data."""
    blocks = find_blocks(model)
    notes = modifier.prepare(model, blocks)
    if modifier.unties_embeddings:
        LoadedSource(model, None).untie()
    modifier.read(model, "")
    for index, block in enumerate(blocks.modules):
        modifier.read(block, blocks.name(index))
    return notes


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16, "num_key_value_heads": 1},
    "phi3": {},
    "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 1.5},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "modifier",
    [
        SpinQuantModifier(),
        SpinQuantModifier(rotations=["R1"], transform_type="random-hadamard", transform_block_size=32, seed=3),
        SpinQuantModifier(rotations=["R1", "R2", "R4"], transform_type="random-matrix"),
        QuIPModifier(rotations=["v", "u"]),
    ],
    ids=["R1R2", "blocks", "R4", "quip"],
)
def test_the_rotated_model_has_the_same_logits(family: str, modifier: Transform) -> None:
    model = randomized(family, **FAMILIES[family])
    before, weights = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    notes = transform(model, modifier)
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)
    down = next(name for name in weights if name.endswith("down_proj.weight"))
    assert (model.state_dict()[down] - weights[down]).norm() > 0.5 * weights[down].norm()
    tied = before.shape and family in ("qwen2", "gemma") and modifier.unties_embeddings
    assert any("of its own" in note for note in notes) == bool(tied)


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_a_sandwich_of_norms_takes_all_but_the_residual_rotation(family: str) -> None:
    model = randomized(family)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0 has .*inside of the residual branch.*\['R2'\]"):
        SpinQuantModifier().prepare(model, find_blocks(model))
    before = logits(model)
    transform(model, SpinQuantModifier(rotations=["R2", "R4"]))
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)


def test_experts_and_their_routers_are_rotated() -> None:
    model = randomized("llama")
    blocks = find_blocks(model)
    for block in blocks.modules:
        block.mlp = _Mixture(64, 32)
    before = logits(model)
    transform(model, SpinQuantModifier())
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)
    with pytest.raises(UnsupportedModelError, match="4 down projections"):
        SpinQuantModifier(rotations=["R4"]).prepare(model, blocks)
    with pytest.raises(UnsupportedModelError, match="has experts"):
        QuIPModifier().prepare(model, blocks)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}),
        ("deepseek_v3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 24,
                         "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}),
    ],
)  # fmt: skip
def test_experts_in_one_tensor_and_latent_attention_are_rotated(family: str, changes: dict[str, Any]) -> None:
    model = randomized(family, **changes)
    blocks, before = Blocks("model.layers", list(model.model.layers)), logits(model)
    modifier = SpinQuantModifier(rotations=["R1"] if family == "deepseek_v3" else ["R1", "R2"])
    modifier.prepare(model, blocks)
    with torch.no_grad():
        modifier.read(model, "")
        for index, block in enumerate(blocks.modules):
            modifier.read(block, blocks.name(index))
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)
    if family == "deepseek_v3":
        with pytest.raises(UnsupportedModelError, match="R2 is impossible"):
            SpinQuantModifier(rotations=["R2"]).prepare(model, blocks)


class _Mixture(nn.Module):
    """Softly mixed experts, as separate modules."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, 4, bias=False)
        self.experts = nn.ModuleList(_Expert(hidden, inner) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(dim=-1)
        return sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


class _Expert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x).relu())


@pytest.mark.parametrize("family", ["opt", "gpt_neox", "cohere", "olmo"])
def test_other_norms_are_refused(family: str) -> None:
    model = tiny_model(family, pad_token_id=0)
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__}: .*norm \(.*Norm\) is no RMSNorm"):
        SpinQuantModifier(rotations=["R1"]).prepare(model, find_blocks(model))


def test_an_unknown_weight_in_a_block_is_refused_by_name() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mixer = nn.Linear(64, 64)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mixer\.weight"):
        SpinQuantModifier().prepare(model, find_blocks(model))
    model = tiny_model("llama")
    model.model.positions = nn.Embedding(128, 64)
    with pytest.raises(UnsupportedModelError, match=r"model\.positions\.weight is outside"):
        SpinQuantModifier().prepare(model, find_blocks(model))


def test_a_gate_behind_attention_makes_value_rotations_impossible() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj = nn.Linear(64, 128, bias=False)  # queries and a gate of each output
    with pytest.raises(UnsupportedModelError, match="R2 is impossible"):
        SpinQuantModifier(rotations=["R2"]).prepare(model, find_blocks(model))


def test_norms_are_told_apart_by_what_they_compute() -> None:
    class Gemma(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)

    assert norm_offset(nn.RMSNorm(32), "norm") == 0.0
    assert norm_offset(Gemma(32), "norm") == 1.0
    for other in (nn.LayerNorm(32), nn.LayerNorm(32, bias=False)):
        with pytest.raises(UnsupportedModelError, match=r"norm \(LayerNorm\) is no RMSNorm"):
            norm_offset(other, "norm")


@pytest.mark.parametrize(
    ("kind", "arguments", "match"),
    [
        (SpinQuantModifier, {"rotations": ["R1", "R5"]}, "R1, R2, R3, R4"),
        (SpinQuantModifier, {"rotations": []}, "some of"),
        (SpinQuantModifier, {"rotations": ["R3"]}, "KV cache"),
        (SpinQuantModifier, {"transform_type": "learned"}, "random-matrix"),
        (QuIPModifier, {"rotations": ["w"]}, "v, u"),
        (QuIPModifier, {"transform_type": "learned"}, "random-matrix"),
    ],
)
def test_wrong_arguments(kind: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        kind(**arguments)


def test_a_block_that_does_not_fit_is_refused() -> None:
    model = tiny_model("llama")
    for modifier in (
        SpinQuantModifier(rotations=["R1"], transform_block_size=24),
        SpinQuantModifier(rotations=["R4"], transform_block_size=48),
        QuIPModifier(transform_block_size=64),
    ):
        with pytest.raises(UserError, match="transform_block_size"):
            modifier.prepare(model, find_blocks(model))
