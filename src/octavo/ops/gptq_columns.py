"""The inner loop of GPTQ: columns of a weight are rounded one after the other, those after them make good the error."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops.cpu import library
from octavo.ops.dispatch import Candidate, Operation

_LEAF = 16  # columns whose updates are made at once, one by one; larger spans go through matrix products


class Levels(NamedTuple):
    """The values that are rounded to: low .. high, integers, or floats of `mantissa_bits` (None: integers) whose
    spacing stays that of the exponent `least_exponent` below it."""

    low: float
    high: float
    mantissa_bits: int | None = None
    least_exponent: int = 0


class Columns(NamedTuple):
    """A weight on its side, columns as rows in the order in which they are rounded; everything float32.

    work: [K, N] the values to be rounded, which change. levels, errors: [K, N], written: what a value became, without
    its zero point, and the error that is passed on, divided by the factor's diagonal. factor: [K, K] upper triangular U
    with U'U the inverse of the Hessian. groups: int32 [K], the row of `steps` [G, N] and of `zeros` ([G, N] or None)
    that a column has. keep: bool [K, N] or None; where it is false, the value becomes zero.
    """

    work: Tensor
    levels: Tensor
    errors: Tensor
    factor: Tensor
    groups: Tensor
    steps: Tensor
    zeros: Tensor | None
    keep: Tensor | None


def _reference(work: Tensor, columns: Columns, start: int, stop: int, number: Levels) -> None:
    _Span(columns, number, columns.groups[start:stop].tolist(), start).round(start, stop)


class _Span:
    """Some columns that are rounded by torch's operations, with what is needed of each at hand."""

    def __init__(self, columns: Columns, number: Levels, groups: list[int], first: int) -> None:
        self.columns, self.number, self.groups, self.first = columns, number, groups, first
        stop = first + len(groups)
        self.diagonal: list[float] = columns.factor.diagonal()[first:stop].tolist()

    def round(self, start: int, stop: int) -> None:
        """Halves until few columns are left: the second half is brought up to date by one matrix product."""
        work, errors, factor = self.columns.work, self.columns.errors, self.columns.factor
        if stop - start > _LEAF:
            middle = start + (stop - start + 1) // 2
            self.round(start, middle)
            work[middle:stop].addmm_(factor[start:middle, middle:stop].t(), errors[start:middle], alpha=-1)
            self.round(middle, stop)
            return
        for column in range(start, stop):
            self._round_one(column)
            if column + 1 < stop:
                work[column + 1 : stop].addr_(factor[column, column + 1 : stop], errors[column], alpha=-1)

    def _round_one(self, column: int) -> None:
        group = self.groups[column - self.first]
        value, level, error = self.columns.work[column], self.columns.levels[column], self.columns.errors[column]
        step = self.columns.steps[group]
        torch.div(value, step, out=level)
        zero = None if self.columns.zeros is None else self.columns.zeros[group]
        if zero is not None:
            level.add_(zero)
        round_to_levels(level, self.number)
        if zero is not None:
            level.sub_(zero)
        if self.columns.keep is not None:
            level.mul_(self.columns.keep[column])
        torch.addcmul(value, level, step, value=-1, out=error)
        error.div_(self.diagonal[column - self.first])


def round_to_levels(values: Tensor, number: Levels) -> Tensor:
    """float32 `values` become the nearest levels, in place: half goes to even, beyond the range is cut."""
    values.clamp_(number.low, number.high)
    if number.mantissa_bits is None:
        return values.round_()
    power = (values.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2 to the exponent
    spacing = power.clamp_min_(2.0**number.least_exponent).mul_(2.0**-number.mantissa_bits)
    return values.div_(spacing).round_().mul_(spacing)


class _ColumnsStruct(ctypes.Structure):
    """Mirrors `struct Columns` of round_columns.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in Columns._fields),
        *((name, ctypes.c_int64) for name in ("rows", "factor_row", "factor_column")),
    ]


def _compiled(work: Tensor, columns: Columns, start: int, stop: int, number: Levels) -> Any:
    dense = [tensor for tensor in columns if tensor is not None and tensor is not columns.factor]
    if number.mantissa_bits is not None or not all(tensor.is_contiguous() for tensor in dense):
        return NotImplemented
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in columns]
    struct = _ColumnsStruct(*pointers, work.shape[1], *columns.factor.stride())
    _LIBRARY.octavo_round_columns(ctypes.byref(struct), start, stop, number.low, number.high)
    return None


def _triton(*args: Any) -> Any:
    from octavo.ops.triton import gptq_columns

    return gptq_columns.round_columns(*args)


_LIBRARY: Any = library.load()[0]
_operation = Operation(
    "round_columns",
    Candidate(
        "triton", _triton, devices=("cuda",),
        unavailable=None if importlib.util.find_spec("triton") else "triton is not installed",
    ),
    Candidate("c++", _compiled, ("cpu",), (torch.float32,), library.unavailable()),
    Candidate("torch", _reference),
)  # fmt: skip


def round_columns(columns: Columns, start: int, stop: int, number: Levels) -> None:
    """Round columns start .. stop, which are up to date when this begins; writes their `levels` and `errors`.

    What is left of `work` for these columns is not defined; the columns after them are not brought up to date.
    """
    _operation(columns.work, columns, start, stop, number)
