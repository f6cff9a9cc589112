"""Norms and gated activations: the reference against closed forms, kernels against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import ops
from octavo.ops import reference

SHAPES = [(1, 576), (3, 100), (7, 37), (200, 576)]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(actual: Tensor, expected: Tensor) -> None:
    """`expected` is float32; one rounding to bfloat16 is off by at most 2^-8 of the value."""
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=2**-7.9, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int]) -> None:
    x, weight = random(*shape), random(shape[1], seed=1)
    expected = F.rms_norm(x.float(), (shape[1],), weight.float(), 1e-5)
    assert_rounded_once(ops.rms_norm(x, weight, 1e-5), expected)
    out = torch.empty_like(x)
    assert ops.rms_norm(x, weight, 1e-5, out) is out
    assert_rounded_once(out, expected)
    torch.testing.assert_close(ops.rms_norm(x.float(), weight.float(), 1e-5), expected)


def test_rms_norm_of_a_slice() -> None:
    x, weight = random(4, 200)[:, 50:114], random(64, seed=1)
    assert_rounded_once(ops.rms_norm(x, weight, 1e-5), F.rms_norm(x.float(), (64,), weight.float(), 1e-5))


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_changes_the_residual(shape: tuple[int, int]) -> None:
    x, residual, weight = random(*shape), random(*shape, seed=1), random(shape[1], seed=2)
    total = x + residual
    y = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert_rounded_once(y, reference.rms_norm(total.float(), weight.float(), 1e-6))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gated_activations(shape: tuple[int, int], name: str) -> None:
    x = random(shape[0], 2 * shape[1]) * 4
    x[0, :4] = torch.tensor([-200.0, 200.0, -0.0, 30.0])
    gate, up = x.float().chunk(2, dim=1)
    activated = F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")
    function = ops.silu_mul if name == "silu" else ops.gelu_tanh_mul
    assert_rounded_once(function(x), activated * up)
    torch.testing.assert_close(function(x.float()), activated * up)


def test_rotary_reference_is_a_rotation() -> None:
    """Scores depend on the distance of two positions only, and position 0 does not turn."""
    d, x = 8, random(1, 1, 8, dtype=torch.float32)
    angles = torch.arange(20)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    for pairs in (False, True):
        turned = [reference.rotate(x, angles[i : i + 1].cos(), angles[i : i + 1].sin(), pairs)[0, 0] for i in range(20)]
        assert torch.equal(turned[0], x[0, 0])
        torch.testing.assert_close(turned[3] @ turned[7], turned[11] @ turned[15])
        assert not torch.allclose(turned[3] @ turned[7], turned[3] @ turned[12])
    assert d == x.shape[-1]
