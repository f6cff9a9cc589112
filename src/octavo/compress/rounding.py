"""Symmetric integer rounding with one scale a group of inputs: W[n, k] is about scale[n, g] * code[n, k]."""

from __future__ import annotations

import torch
from torch import Tensor


def code_range(num_bits: int) -> tuple[int, int]:
    """Smallest and largest signed code, -8 and 7 for 4 bits."""
    return -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1


def usable_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale` rounded to the dtype that it is stored in, as float32; zeros become the dtype's epsilon."""
    stored = scale.to(dtype)
    stored = torch.where(stored == 0, torch.full_like(stored, torch.finfo(dtype).eps), stored)
    return stored.float()


def quantize(weight: Tensor, scale: Tensor, num_bits: int) -> Tensor:
    """float32 [N, K] and float32 [N, G] -> int8 codes [N, K]; half goes to even, values beyond the range are cut."""
    low, high = code_range(num_bits)
    grouped = weight.reshape(weight.shape[0], scale.shape[1], -1)
    return (grouped / scale.unsqueeze(-1)).round_().clamp_(low, high).to(torch.int8).reshape(weight.shape)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """int8 codes [N, K] and scale [N, G] -> float32 [N, K]."""
    grouped = codes.float().reshape(codes.shape[0], scale.shape[1], -1)
    return grouped.mul_(scale.float().unsqueeze(-1)).reshape(codes.shape)
