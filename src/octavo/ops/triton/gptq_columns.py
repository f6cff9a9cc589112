"""GPTQ's inner loop in one launch a span of columns: a program takes some rows through all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from octavo.ops.gptq_columns import Columns, Levels

MAX_SPAN = 128  # columns whose errors a program keeps in registers
ROWS = 32


@triton.jit
def _nearest_integer(x):
    """Half to even, for magnitudes below 2^22: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def columns_kernel(
    work, levels, errors, factor, groups, steps, zeros, keep, start, count, rows, low, high,
    SPAN: tl.constexpr, ROWS: tl.constexpr, MANTISSA: tl.constexpr, LEAST_POWER: tl.constexpr,
):  # fmt: skip
    """Columns start .. start + count of `ROWS` rows. factor: [SPAN, SPAN], a column of U a row.

    Instead of changing the columns to come, each column is corrected by the errors of those before it when its turn
    comes: they are the only thing that is kept, and only one of them changes a step.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    place = tl.arange(0, SPAN)
    done = tl.zeros((SPAN, ROWS), tl.float32)
    for index in range(0, count):
        offset = (start + index).to(tl.int64) * rows + row
        group = tl.load(groups + start + index).to(tl.int64) * rows + row
        step = tl.load(steps + group, mask=inside, other=1.0)
        share = tl.load(factor + index * SPAN + place)
        value = tl.load(work + offset, mask=inside, other=0.0) - tl.sum(done * share[:, None], axis=0)
        x = tl.div_rn(value, step)
        if zeros is not None:
            zero = tl.load(zeros + group, mask=inside, other=0.0)
            x += zero
        x = tl.minimum(tl.maximum(x, low), high)
        if MANTISSA is None:
            level = _nearest_integer(x)
        else:
            power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            spacing = tl.maximum(power, LEAST_POWER) * (1.0 / (1 << MANTISSA))
            level = _nearest_integer(tl.div_rn(x, spacing)) * spacing
        if zeros is not None:
            level -= zero
        if keep is not None:
            level = tl.where(tl.load(keep + offset, mask=inside, other=0) != 0, level, 0.0)
        diagonal = tl.load(factor + index * SPAN + index)
        error = tl.div_rn(value - level * step, diagonal + tl.zeros_like(step))
        done = tl.where((place == index)[:, None], error[None, :], done)
        tl.store(levels + offset, level, mask=inside)
        tl.store(errors + offset, error, mask=inside)


def round_columns(work: torch.Tensor, columns: Columns, start: int, stop: int, number: Levels) -> Any:
    """See `octavo.ops.gptq_columns.round_columns`."""
    rows = work.shape[1]
    for first in range(start, stop, MAX_SPAN):
        last = min(first + MAX_SPAN, stop)
        factor = torch.zeros(MAX_SPAN, MAX_SPAN, device=work.device)
        factor[: last - first, : last - first] = columns.factor[first:last, first:last].t()
        keep = None if columns.keep is None else columns.keep.view(torch.uint8)
        columns_kernel[(triton.cdiv(rows, ROWS),)](
            work, columns.levels, columns.errors, factor, columns.groups, columns.steps, columns.zeros, keep,
            first, last - first, rows, number.low, number.high,
            SPAN=MAX_SPAN, ROWS=ROWS, MANTISSA=number.mantissa_bits, LEAST_POWER=2.0**number.least_exponent,
            num_warps=4,
        )  # fmt: skip
        if last < stop:
            update = columns.factor[first:last, last:stop].t()
            work[last:stop].addmm_(update, columns.errors[first:last], alpha=-1)
    return None
