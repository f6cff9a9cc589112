"""What a code can stand for: integers of b bits, or the small floats E4M3 (FP8) and E2M1 (FP4).

A weight is scale * (level - zero point), and a level is one of the format's values. Everything that rounds weights
(RTN, the observers' searches, GPTQ's columns) works on levels in float32 and asks the format for the nearest; only
what is stored needs codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.checkpoint.scheme import WeightScheme
from octavo.checkpoint.small_floats import E2M1
from octavo.errors import UserError
from octavo.ops.gptq_columns import Levels, round_to_levels


class NumberFormat(Levels):
    """Levels from `low` to `high`: integers, or floats of `mantissa_bits` down to the exponent `least_exponent`."""

    @property
    def is_integer(self) -> bool:
        """Whether levels are integers, which may have a zero point."""
        return self.mantissa_bits is None

    def round_(self, values: Tensor) -> Tensor:
        """float32 `values` become the nearest levels, in place: half goes to even, beyond the range is cut."""
        return round_to_levels(values, self)

    def encode(self, levels: Tensor) -> Tensor:
        """Levels in float32 -> codes: int8; float8_e4m3fn; E2M1 as uint8 0..15, one a byte."""
        if self.is_integer:
            return levels.to(torch.int8)
        if self == FP8:
            return levels.to(torch.float8_e4m3fn)
        magnitude = torch.bucketize(levels.abs(), E2M1[:8].to(levels.device)).to(torch.uint8)
        return magnitude | ((levels < 0).to(torch.uint8) << 3)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes -> levels in float32."""
        return E2M1.to(codes.device)[codes.to(torch.int32)] if self == FP4 else codes.float()


FP8 = NumberFormat(-448.0, 448.0, mantissa_bits=3, least_exponent=-6)
FP4 = NumberFormat(-6.0, 6.0, mantissa_bits=1, least_exponent=0)


def integer(num_bits: int) -> NumberFormat:
    """Signed integers, -8 to 7 for 4 bits."""
    return NumberFormat(float(-(1 << (num_bits - 1))), float((1 << (num_bits - 1)) - 1))


def format_of(scheme: WeightScheme) -> NumberFormat:
    """The number format of a scheme's codes; UserError for floats of other than 4 or 8 bits."""
    if scheme.type == "int":
        return integer(scheme.num_bits)
    if scheme.num_bits not in (4, 8):
        raise UserError(f"float weights of {scheme.num_bits} bits are not written; 4 (E2M1) and 8 (E4M3) are")
    return FP8 if scheme.num_bits == 8 else FP4
