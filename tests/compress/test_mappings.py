"""Layers that share factors: found in every family, and the model computes the same with any factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model, token_samples
from torch import Tensor, nn

from octavo.compress.blocks import Blocks
from octavo.compress.experts import separate_experts
from octavo.compress.mappings import BlockCheck, Smoothing, find_smoothings, norm_offset

QKV = ("input_layernorm", "post_attention_layernorm", "self_attn.v_proj", "mlp.up_proj")
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": QKV,
    "qwen2": QKV,
    "qwen3": QKV,
    "gemma2": ("input_layernorm", "pre_feedforward_layernorm", "self_attn.v_proj", "mlp.up_proj"),
    "gemma3_text": ("input_layernorm", "pre_feedforward_layernorm", "self_attn.v_proj", "mlp.up_proj"),
    "glm4": ("input_layernorm", "post_attention_layernorm", "self_attn.v_proj", "mlp.gate_up_proj"),
    "olmo": ("self_attn.v_proj", "mlp.up_proj"),  # its norms have no weights
    "olmo2": ("self_attn.v_proj", "mlp.up_proj"),  # its norms come after attention and feed-forward
    "exaone4": ("self_attn.v_proj", "mlp.up_proj"),
    "phi3": ("input_layernorm", "post_attention_layernorm", "self_attn.qkv_proj", "mlp.gate_up_proj"),
    "cohere": ("input_layernorm", "self_attn.v_proj", "mlp.up_proj"),  # one norm for both, side by side
    "phi": ("input_layernorm", "self_attn.v_proj"),
    "opt": ("self_attn_layer_norm", "final_layer_norm", "self_attn.v_proj"),
    "gpt_neox": ("input_layernorm", "post_attention_layernorm"),
    "nemotron": ("input_layernorm", "post_attention_layernorm", "self_attn.v_proj"),
    "mixtral": ("input_layernorm", "post_attention_layernorm", "self_attn.v_proj"),
    "qwen2_moe": (*QKV[:3], "mlp.shared_expert.up_proj"),
    "gpt_oss": ("input_layernorm", "self_attn.v_proj"),  # experts have their weights the other way round
    "deepseek_v3": ("input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm",
                    "self_attn.kv_a_layernorm", "mlp.shared_experts.up_proj"),
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 0,
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "num_experts_per_tok": 2,
    },
}  # fmt: skip


def family_model(family: str) -> Any:
    """A random model whose norms and biases are not what they are initialized to."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 1}
    model = tiny_model(family, **(special | EXTRA.get(family, {})))
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if ("norm" in name and parameter.dim() == 1) or name.endswith("bias"):
            parameter.data += 0.3 * torch.rand(parameter.shape, generator=generator)
    return model.requires_grad_(False)


def block_of(model: Any) -> nn.Module:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 1)[0]


def draw(smoothing: Smoothing, block: nn.Module, seed: int) -> Tensor:
    columns = block.get_parameter(smoothing.readers[0]).shape[-1]
    return smoothing.shared(torch.rand(columns, generator=torch.Generator().manual_seed(seed)) * 3 + 0.3)


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_change_no_logit(family: str) -> None:
    model = family_model(family)
    block, tokens = block_of(model), torch.tensor(token_samples(2))
    before = model(tokens).logits
    found = find_smoothings(block, model.config)
    assert tuple(smoothing.smooth for smoothing in found) == FAMILIES[family]
    for seed, smoothing in enumerate(found):
        old = block.get_parameter(smoothing.readers[0]).clone()
        smoothing.apply(block, draw(smoothing, block, seed))
        assert not torch.equal(old, block.get_parameter(smoothing.readers[0]))
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-4)


def test_routers_read_what_experts_read() -> None:
    model = family_model("mixtral")
    found = {smoothing.smooth: smoothing for smoothing in find_smoothings(block_of(model), model.config)}
    smoothing = found["post_attention_layernorm"]
    assert "mlp.gate.weight" in smoothing.readers
    assert smoothing.input == "mlp"


def test_each_expert_of_its_own_is_scaled() -> None:
    model = family_model("mixtral")
    tokens = torch.tensor(token_samples(2))
    before = model(tokens).logits
    separate_experts(model)
    block = block_of(model)
    found = find_smoothings(block, model.config)
    mixture, downs = found[1], found[3:]
    assert mixture.input == "block_sparse_moe"
    assert len(mixture.readers) == 2 * 4 + 1
    assert [s.input for s in downs] == [f"block_sparse_moe.experts.{number}.w2" for number in range(4)]
    for seed, smoothing in enumerate(found):
        smoothing.apply(block, draw(smoothing, block, seed))
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-4)


def test_heads_that_share_values_share_factors() -> None:
    model = family_model("llama")
    block = block_of(model)
    values = next(s for s in find_smoothings(block, model.config) if s.smooth == "self_attn.v_proj")
    assert (values.repeats, values.head_dim) == (2, 16)
    mean, largest = values.shared(torch.arange(64.0)), values.shared(torch.arange(64.0), largest=True)
    assert mean[0] == mean[16] == 8
    assert largest[0] == largest[16] == 16
    assert mean[32] == mean[48] == 40


@pytest.mark.parametrize(("family", "offset"), [("llama", 0.0), ("gemma2", 1.0), ("nemotron", 1.0), ("opt", 0.0)])
def test_norms_tell_what_they_add_to_their_weight(family: str, offset: float) -> None:
    block = block_of(family_model(family))
    norm = getattr(block, "input_layernorm", None) or block.self_attn_layer_norm
    assert norm_offset(norm) == offset


def test_a_norm_of_another_kind_has_no_offset() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, rows: Tensor) -> Tensor:
            return rows * self.weight.square()

    assert norm_offset(Shifted()) is None
    assert norm_offset(nn.Linear(8, 8)) is None


def checked(block: nn.Module, model: Any, smoothing: Smoothing) -> float:
    check = BlockCheck()
    check.attach(block)
    model(torch.tensor(token_samples(3)), use_cache=False)
    check.begin(block)
    smoothing.apply(block, draw(smoothing, block, 0))
    change = check.difference(block)
    check.detach()
    return change


def test_the_check_tells_right_from_wrong() -> None:
    model = family_model("llama")
    block = block_of(model)
    right = find_smoothings(block, model.config)[0]
    assert checked(block, model, right) < 1e-5
    forgetful = Smoothing(right.smooth, right.readers[:1], right.input)  # keys and values read the norm as well
    assert checked(block, model, forgetful) > 0.05


def test_the_check_runs_the_first_sequence_alone() -> None:
    model = family_model("llama")
    block = block_of(model)
    check = BlockCheck()
    check.attach(block)
    model(torch.tensor(token_samples(3)), use_cache=False)
    check.begin(block)
    assert check._before is not None
    assert check._before.shape == (1, 24, 64)
    assert check.difference(block) == 0
    assert not block._forward_pre_hooks


def test_blocks_of_a_model_are_what_the_names_are_about() -> None:
    model = family_model("llama")
    blocks = Blocks("model.layers", list(model.model.layers))
    found = find_smoothings(blocks.modules[0], model.config)
    assert list(found[1].layers(blocks.modules[0])) == ["mlp.gate_proj", "mlp.up_proj"]
