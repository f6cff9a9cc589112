"""Sums over tokens of products of inputs: X'X and (X* - X)'X, in float32 from inputs of 16 or 32 bits.

Inputs of 16 bits are multiplied as such where the device can do it: that is exact up to the summation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from octavo.ops.cpu import library
from octavo.ops.dispatch import Candidate, Operation

_PANELS = 6  # into which a Gram matrix is cut; more of them compute less of the unneeded half, in smaller products
_SHORT = (torch.bfloat16, torch.float16)


def _gram_reference(rows: Tensor, total: Tensor) -> None:
    wide = rows.float()
    with bfloat16_products(rows.dtype == torch.bfloat16):
        for start, stop in panels(len(total)):
            total[start:, start:stop].addmm_(wide[:, start:].t(), wide[:, start:stop])


def _gram_cuda(rows: Tensor, total: Tensor) -> None:
    for start, stop in panels(len(total)):
        total[start:, start:stop] += torch.mm(rows[:, start:].t(), rows[:, start:stop], out_dtype=torch.float32)


def _gram_cpu(rows: Tensor, total: Tensor) -> Any:
    return _compiled(total, rows, None, rows, is_lower=True)


def _drift_reference(exact: Tensor, rows: Tensor, total: Tensor) -> None:
    difference = _difference(exact, rows)
    with bfloat16_products(rows.dtype == torch.bfloat16):
        total.addmm_(difference.float().t(), rows.float())


def _drift_cuda(exact: Tensor, rows: Tensor, total: Tensor) -> None:
    total += torch.mm(_difference(exact, rows).t(), rows, out_dtype=torch.float32)


def _drift_cpu(exact: Tensor, rows: Tensor, total: Tensor) -> Any:
    return _compiled(total, exact, rows, rows, is_lower=False)


def _difference(exact: Tensor, rows: Tensor) -> Tensor:
    """Rounded after the difference is taken, not before, which would leave little of it."""
    return torch.nan_to_num(exact.float() - rows.float(), posinf=0.0, neginf=0.0).to(rows.dtype)


def _compiled(total: Tensor, left: Tensor, minus: Tensor | None, right: Tensor, is_lower: bool) -> Any:
    given = [tensor for tensor in (left, minus, right) if tensor is not None]
    if not total.is_contiguous() or any(tensor.dtype != torch.bfloat16 for tensor in given):
        return NotImplemented
    left, right = left.contiguous(), right.contiguous()
    minus = None if minus is None else minus.contiguous()
    _LIBRARY.octavo_add_product(
        total.data_ptr(), left.data_ptr(), None if minus is None else minus.data_ptr(), right.data_ptr(),
        len(left), left.shape[1], right.shape[1], is_lower,
    )  # fmt: skip
    return None


def panels(size: int) -> list[tuple[int, int]]:
    """Ranges of columns, together all of them."""
    width = max(128, -(-size // (64 * _PANELS)) * 64)
    return [(start, min(start + width, size)) for start in range(0, size, width)]


@contextmanager
def bfloat16_products(wanted: bool = True) -> Iterator[None]:
    """float32 matrix products on the CPU may round their inputs to bfloat16 inside (harmless if they are bfloat16)."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if wanted:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


_LIBRARY: Any = library.load()[0]
# Without instructions for bfloat16 torch's float32 products are faster.
_reason = library.unavailable() or (None if library.level() >= 2 else "this CPU has no products of bfloat16")
_gram = Operation(
    "add_gram",
    Candidate("torch mm", _gram_cuda, ("cuda",), _SHORT),
    Candidate("c++", _gram_cpu, ("cpu",), (torch.bfloat16,), _reason),
    Candidate("torch", _gram_reference),
)
_drift = Operation(
    "add_drift",
    Candidate("torch mm", _drift_cuda, ("cuda",), _SHORT),
    Candidate("c++", _drift_cpu, ("cpu",), (torch.bfloat16,), _reason),
    Candidate("torch", _drift_reference),
)


def add_gram(rows: Tensor, total: Tensor) -> None:
    """Add the lower triangle of rows' rows (rows: [tokens, K]) to `total` [K, K]; what is above it is not defined."""
    _gram(rows, total)


def add_drift(exact: Tensor, rows: Tensor, total: Tensor) -> None:
    """Add (exact - rows)' rows, both [tokens, K], to `total` [K, K]; differences that are not finite count as 0."""
    _drift(exact, rows, total)
