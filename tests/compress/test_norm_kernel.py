"""RMS norms by the server's kernel during calibration, beside transformers' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from octavo.compress.norm_kernel import use_norm_kernel
from octavo.ops.cpu import library

needs_kernels = pytest.mark.skipif(library.unavailable() is not None, reason="the kernels are not built")


class Norm(nn.Module):
    """As Llama's; `offset` is 1 in Gemma's."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon, self.offset = 1e-5, offset

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * wide.to(hidden.dtype)


def runs_kernel(norm: Any) -> bool:
    return "forward" in vars(norm)


@needs_kernels
def test_plain_norms_run_the_kernel_and_give_what_they_gave() -> None:
    norm = Norm(96).bfloat16().requires_grad_(False)
    hidden = torch.randn(3, 5, 96).bfloat16()
    expected = norm(hidden)
    use_norm_kernel(norm)
    assert runs_kernel(norm)
    torch.testing.assert_close(norm(hidden).float(), expected.float(), rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(norm(hidden.transpose(0, 1)), norm(hidden).transpose(0, 1))
    assert torch.equal(norm.float()(hidden.float()), Norm.forward(norm, hidden.float())), "float32 is not its business"


@needs_kernels
def test_a_copy_has_weights_of_its_own() -> None:
    norm = Norm(64).bfloat16().requires_grad_(False)
    use_norm_kernel(norm)
    other = copy.deepcopy(norm)
    norm.weight.zero_()
    assert other(torch.ones(1, 64, dtype=torch.bfloat16)).count_nonzero() > 0
    assert norm(torch.ones(1, 64, dtype=torch.bfloat16)).count_nonzero() == 0


@needs_kernels
def test_gradients_are_the_class_s_own() -> None:
    norm = Norm(64).bfloat16().requires_grad_(False)
    use_norm_kernel(norm)
    leaf = torch.randn(2, 64).bfloat16().requires_grad_()
    norm(leaf).sum().backward()
    assert leaf.grad is not None


def test_other_norms_are_left_alone() -> None:
    others = (Norm(64, offset=1.0), nn.LayerNorm(64, bias=False), nn.Linear(64, 64, bias=False))
    for norm in others:
        use_norm_kernel(norm)
        assert not runs_kernel(norm)
