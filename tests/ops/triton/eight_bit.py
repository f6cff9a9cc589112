"""Operands of 8-bit products with their exact results."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops import reference


def operands(m: int, n: int, k: int, kind: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of rows and of a weight, and their product in float64."""
    generator = torch.Generator().manual_seed(m * n + k)
    codes, scale = reference.quantize_rows(torch.randn(m, k, generator=generator), kind)
    weight, weight_scale = reference.quantize_rows(torch.randn(n, k, generator=generator) / k**0.5, kind)
    exact = (codes.double() @ weight.double().T) * scale.double() * weight_scale.double().T
    return tuple(t.to(device) for t in (codes, scale, weight, weight_scale.flatten(), exact))  # type: ignore[return-value]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())
