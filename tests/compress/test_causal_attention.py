"""Attention of calibration passes: by the server's kernel what it covers, the rest as torch does it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from octavo.compress import causal_attention as ours
from octavo.ops.cpu import library

needs_kernel = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))


def case(batch: int, heads: int, kv_heads: int, length: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((batch, length, heads, width), *[(batch, length, kv_heads, width)] * 2)
    tensors = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes)
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
    return (module, *tensors)


@needs_kernel
@pytest.mark.parametrize("shape", [(2, 4, 2, 33, 64), (1, 3, 1, 16, 32), (3, 6, 6, 50, 48), (1, 8, 2, 200, 128)])
def test_it_is_torchs_causal_attention(shape, monkeypatch):
    given = case(*shape, torch.bfloat16)
    expected, _ = sdpa_attention_forward(*(x.float() if isinstance(x, torch.Tensor) else x for x in given), None)
    calls = []
    monkeypatch.setattr(ours, "paged_attention", lambda *a, real=ours.paged_attention: calls.append(1) or real(*a))
    found, _ = ours.causal_attention(*given, None, scaling=None)
    assert calls == [1]
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("reason", ["mask", "float32", "gradient", "not causal", "one token"])
def test_the_rest_is_left_to_torch(reason, monkeypatch):
    length = 1 if reason == "one token" else 20
    module, *given = case(2, 4, 2, length, 32, torch.float32 if reason == "float32" else torch.bfloat16)
    mask = torch.rand(2, 1, length, length) > 0.3 if reason == "mask" else None
    options: dict[str, Any] = {"is_causal": False} if reason == "not causal" else {}
    if reason == "gradient":
        given[0] = given[0].detach().requires_grad_()
    expected, _ = sdpa_attention_forward(module, *given, mask, **options)
    monkeypatch.setattr(ours, "paged_attention", None)
    assert torch.equal(ours.causal_attention(module, *given, mask, **options)[0], expected)


@needs_kernel
def test_a_model_attends_by_it(monkeypatch):
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=96,
        vocab_size=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = torch.randint(0, 128, (3, 40))
    with torch.no_grad():
        expected = model(tokens).logits
        ours.use_causal_kernel(model)
        assert model.config._attn_implementation == ours.IMPLEMENTATION
        calls = []
        monkeypatch.setattr(ours, "paged_attention", lambda *a, real=ours.paged_attention: calls.append(1) or real(*a))
        found = model(tokens).logits
    assert calls == [1, 1]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
