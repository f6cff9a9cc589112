"""Products, norms and log-softmax of which a row has the same bits among any number of rows."""

from __future__ import annotations

import pytest
import torch
from exact import exact_casts, exact_products  # noqa: F401
from random_weights import quantized
from test_weights_8bit import make
from torch import Tensor

from octavo.ops import reference
from octavo.ops.packed_weight import TorchDense, TorchQuantized
from octavo.ops.triton import log_softmax, norm_deterministic, weights, weights_8bit
from octavo.ops.triton.weights_deterministic import FixedTiles

ROWS = 130
KINDS = ("bf16", "4s", "4m", "8s", "int8", "fp8")


def packed(kind: str, n: int, k: int, device: torch.device) -> tuple[FixedTiles, Tensor]:
    """A weight with fixed tiles, and the same weight dequantized."""
    generator = torch.Generator().manual_seed(n)
    if kind == "bf16":
        dense = (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()
        return FixedTiles(weights.TritonDense(dense, device)), TorchDense(dense, torch.bfloat16, device).weight.float()
    weight = make(n, k, kind) if kind in ("int8", "fp8") else quantized(n, k, kind, 32, generator)
    exact = TorchQuantized(weight, torch.bfloat16, device).rows(slice(None), torch.float32)
    if kind in ("int8", "fp8"):
        return FixedTiles(weights_8bit.pack(weight, torch.bfloat16, device)), exact
    return FixedTiles(weights.pack_codes(weight, torch.bfloat16, device)), exact


@pytest.mark.usefixtures("exact_casts", "exact_products")
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_has_the_same_bits_among_any_rows(kind: str, device: torch.device) -> None:
    weight, exact = packed(kind, 72, 160, device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 160, generator=generator).bfloat16().to(device)
    bias = torch.randn(72, generator=generator).bfloat16().to(device)
    for out_dtype in (torch.bfloat16, torch.float32):
        whole = weight.linear(x, bias, out_dtype)
        assert whole.dtype == out_dtype
        for count in (1, 3, 17, 64):
            rows = torch.randperm(ROWS, generator=generator)[:count].to(device)
            assert torch.equal(weight.linear(x[rows], bias, out_dtype), whole[rows]), (out_dtype, count)
    wanted = x.float() @ exact.T + bias.float()
    assert float((whole - wanted).norm() / wanted.norm()) < (0.04 if kind in ("int8", "fp8") else 0.01)


def test_norms_have_the_same_bits_among_any_rows(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(200, 96, generator=generator).bfloat16().to(device) for _ in range(2))
    weight = torch.rand(96, generator=generator).bfloat16().to(device)
    whole = norm_deterministic.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(whole, reference.rms_norm(x, weight, 1e-5), rtol=0.01, atol=0.01)
    total = residual.clone()
    added = norm_deterministic.add_rms_norm(x, total, weight, 1e-5)
    torch.testing.assert_close(total, x + residual, rtol=0.01, atol=0.01)
    for rows in (slice(7, 8), slice(100, 117), slice(0, 140)):
        assert torch.equal(norm_deterministic.rms_norm(x[rows], weight, 1e-5), whole[rows])
        part = residual[rows].clone()
        assert torch.equal(norm_deterministic.add_rms_norm(x[rows], part, weight, 1e-5), added[rows])
        assert torch.equal(part, total[rows])


def test_log_softmax_has_the_same_bits_among_any_rows(device: torch.device) -> None:
    logits = 5 * torch.randn(9, 5001, generator=torch.Generator().manual_seed(3)).to(device)
    logits[4, ::3] = float("-inf")
    whole = log_softmax.log_softmax(logits)
    torch.testing.assert_close(whole, torch.log_softmax(logits, dim=-1))
    for rows in (slice(4, 5), slice(2, 8)):
        assert torch.equal(log_softmax.log_softmax(logits[rows]), whole[rows])
