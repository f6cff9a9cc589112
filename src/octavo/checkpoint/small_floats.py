"""Floats of 4 and 6 bits and scales that are powers of two, as the microscaling formats (OCP MX 1.0) and NVFP4 have."""

from __future__ import annotations

import torch
from torch import Tensor


def _values(exponent_bits: int, mantissa_bits: int) -> Tensor:
    """The value of each code, float32: sign, then exponent (0: no leading one), then mantissa; no infinities."""
    bias = (1 << (exponent_bits - 1)) - 1
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits) + (1 if exponent else 0)
        values.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    return torch.tensor(values + [-value for value in values])


E2M1 = _values(2, 1)
E2M3 = _values(2, 3)


def decode_nibbles(packed: Tensor, values: Tensor) -> Tensor:
    """uint8 [..., K / 2], the even element in the low nibble -> float32 [..., K]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return values[codes.to(torch.int32)]


def decode_sixes(packed: Tensor, values: Tensor) -> Tensor:
    """uint8 [..., 3 K / 4], four codes in three bytes, the first in the lowest bits -> float32 [..., K]."""
    first, second, third = packed.to(torch.int32).unflatten(-1, (-1, 3)).unbind(-1)
    word = first | (second << 8) | (third << 16)
    codes = torch.stack([(word >> shift) & 63 for shift in (0, 6, 12, 18)], dim=-1)
    return values[codes.flatten(-2)]


def power_of_two(exponent: Tensor) -> Tensor:
    """E8M0 scales, uint8 -> float32: 2^(e - 127), and NaN for 255."""
    return torch.where(exponent == 255, torch.nan, torch.exp2(exponent.to(torch.float32) - 127))
