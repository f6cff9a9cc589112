"""Products of 8-bit codes whose scales are left to the kernel that reads them next. Imports no triton.

cuBLAS multiplies FP8 fastest where it need not know a scale a row. Sums of code products fit bfloat16's range, and its
rounding is relative: it costs as many digits before the scales as after them. The reader multiplies in float32.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Scaled(NamedTuple):
    """y[m, n] = values[m, n] * row[m] * column[n]."""

    values: Tensor
    """bfloat16 [M, N], contiguous."""
    row: Tensor
    """float32 [M, 1], of the codes of each row."""
    column: Tensor
    """float32 [N], of the weight's rows: nothing writes it, so that kernels may read it early."""


def parts(x: Tensor | Scaled) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(numbers, scales of rows, scales of columns), the last two None where the numbers are whole."""
    return x if isinstance(x, Scaled) else (x, None, None)
