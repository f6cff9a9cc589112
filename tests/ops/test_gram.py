"""Products over tokens: compiled and torch's against float64."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import gram
from octavo.ops.cpu import library
from octavo.ops.gram import add_drift, add_gram

compiled = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
SIZES = [(1, 1), (3, 7), (33, 64), (100, 70), (1024, 130), (1025, 96), (2500, 200)]


def inputs(tokens: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, scale: float) -> None:
    assert float((found.double() - expected).abs().max()) < 1e-6 * scale


@compiled
@pytest.mark.parametrize(("tokens", "size"), SIZES)
def test_compiled_products_are_exact_up_to_the_summation(tokens, size):
    rows, exact = inputs(tokens, size, torch.bfloat16), inputs(tokens, size, torch.bfloat16, seed=1)
    total, drift = torch.ones(size, size), torch.ones(size, size)
    assert gram._gram_cpu(rows, total) is None
    assert_close(total.tril(), (1 + rows.double().t() @ rows.double()).tril(), 4 * tokens)
    assert gram._drift_cpu(exact, rows, drift) is None
    difference = (exact.float() - rows.float()).to(torch.bfloat16).double()
    assert_close(drift, 1 + difference.t() @ rows.double(), 4 * tokens)


@compiled
def test_compiled_products_leave_other_dtypes_to_torch():
    assert gram._gram_cpu(inputs(4, 8, torch.float32), torch.zeros(8, 8)) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_dtype(dtype):
    rows, exact, total, drift = inputs(300, 200, dtype), inputs(300, 200, dtype, 1), *torch.zeros(2, 200, 200)
    add_gram(rows, total)
    assert_close(total.tril(), (rows.double().t() @ rows.double()).tril(), 2000)
    add_drift(exact, rows, drift)
    difference = (exact.float() - rows.float()).to(dtype).double()
    assert_close(drift, difference.t() @ rows.double(), 2000)


def test_differences_that_are_not_finite_count_as_zero():
    rows, exact = inputs(64, 40, torch.bfloat16), inputs(64, 40, torch.bfloat16, 1)
    exact[5, 3], exact[6, 4] = torch.inf, torch.nan
    drift = torch.zeros(40, 40)
    add_drift(exact, rows, drift)
    exact[5, 3], exact[6, 4] = rows[5, 3], rows[6, 4]
    expected = (exact.float() - rows.float()).to(torch.bfloat16).double().t() @ rows.double()
    assert_close(drift, expected, 500)
