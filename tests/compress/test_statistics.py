"""What calibration sums up about a layer's inputs, against plain formulas."""

from __future__ import annotations

import pytest
import torch

from octavo.compress.statistics import SAMPLED_ROWS, InputStatistics


@pytest.mark.parametrize("columns", [64, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_sum_the_inputs(columns: int, dtype: torch.dtype) -> None:
    rows = torch.randn(300, columns).to(dtype)
    statistics, diagonal = InputStatistics(columns, {"hessian"}), InputStatistics(columns, {"diagonal"})
    for part in rows.split(128):
        statistics.add(part)
        diagonal.add(part)
    expected = rows.double().t() @ rows.double()
    torch.testing.assert_close(statistics.hessian().double(), expected, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(diagonal.diagonal().double(), expected.diagonal(), rtol=1e-4, atol=1e-2)
    assert statistics.tokens == 300


def test_non_finite_tokens_are_left_out_and_counted() -> None:
    rows = torch.randn(50, 16)
    spoiled = rows.clone()
    spoiled[[4, 9], [0, 3]] = torch.tensor([torch.nan, torch.inf])
    statistics, expected = InputStatistics(16, {"hessian"}), InputStatistics(16, {"hessian"})
    statistics.add(spoiled)
    keep = torch.ones(50, dtype=torch.bool)
    keep[[4, 9]] = False
    expected.add(rows[keep])
    assert statistics.non_finite == 2
    torch.testing.assert_close(statistics.hessian(), expected.hessian())


def test_magnitudes_ranges_and_rows() -> None:
    rows = torch.randn(1300, 16)
    statistics = InputStatistics(16, {"absmean", "range", "rows"})
    for part in rows.split(500):
        statistics.add(part.reshape(2, -1, 16))
    torch.testing.assert_close(statistics.absmean(), rows.abs().mean(dim=0))
    assert torch.equal(statistics.minimum(), rows.amin(dim=0))
    assert torch.equal(statistics.maximum(), rows.amax(dim=0))
    sample = statistics.rows()
    assert sample.shape == (SAMPLED_ROWS, 16)
    assert all((rows == row).all(dim=1).any() for row in sample[::50])


def test_what_was_not_gathered_cannot_be_had() -> None:
    with pytest.raises(ValueError, match="hessian was not gathered"):
        InputStatistics(4, {"range"}).hessian()
    with pytest.raises(ValueError, match="unknown statistics"):
        InputStatistics(4, {"median"})
