"""GPTQ's columns by the kernel against torch's operations, and both against the plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops.gptq_columns import Columns, Levels, _reference, round_to_levels
from octavo.ops.triton.gptq_columns import round_columns

INT4, E4M3, E2M1 = Levels(-8, 7), Levels(-448, 448, 3, -6), Levels(-6, 6, 1, 0)


def random_columns(count: int, rows: int, asymmetric: bool, masked: bool, device: torch.device) -> Columns:
    generator = torch.Generator().manual_seed(count + rows)
    inputs = torch.randn(2 * count, count, generator=generator)
    inverse = torch.linalg.inv(inputs.t() @ inputs / count)
    work = torch.randn(count, rows, generator=generator)
    steps = torch.rand(3, rows, generator=generator) * 0.4 + 0.1
    zeros = torch.randint(-8, 8, (3, rows), generator=generator).float() if asymmetric else None
    keep = torch.rand(count, rows, generator=generator) < 0.6 if masked else None
    groups = torch.randint(0, 3, (count,), generator=generator, dtype=torch.int32)
    factor = torch.linalg.cholesky(inverse, upper=True)
    parts = (work, torch.zeros_like(work), torch.zeros_like(work), factor, groups, steps, zeros, keep)
    return Columns(*(None if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]


def plain(columns: Columns, number: Levels) -> tuple[Tensor, Tensor]:
    """Levels and errors, a column at a time; each column that follows is changed at once."""
    work, levels, errors = columns.work.clone(), [], []
    for column in range(len(work)):
        group = int(columns.groups[column])
        step, zero = columns.steps[group], 0 if columns.zeros is None else columns.zeros[group]
        level = round_to_levels(work[column] / step + zero, number) - zero
        if columns.keep is not None:
            level = level * columns.keep[column]
        error = (work[column] - level * step) / columns.factor[column, column]
        work[column:] -= columns.factor[column, column:, None] * error
        levels.append(level)
        errors.append(error)
    return torch.stack(levels), torch.stack(errors)


@pytest.mark.parametrize(
    ("number", "asymmetric", "masked"),
    [(INT4, False, False), (INT4, True, True), (E4M3, False, False), (E2M1, False, True)],
)
@pytest.mark.parametrize(("count", "rows"), [(40, 37), (150, 8)])
def test_kernel_and_operations_do_the_same(
    number: Levels, asymmetric: bool, masked: bool, count: int, rows: int, device: torch.device
) -> None:
    columns = random_columns(count, rows, asymmetric, masked, device)
    levels, errors = plain(columns, number)
    for run in (_reference, round_columns):
        mine = Columns(*(None if part is None else part.clone() for part in columns))  # type: ignore[arg-type]
        run(mine.work, mine, 0, count, number)
        # A tie that falls the other way changes what follows in its row.
        close = torch.isclose(mine.levels, levels, atol=1e-4) & torch.isclose(mine.errors, errors, atol=1e-3)
        assert close.float().mean() > 0.98
        if columns.keep is not None:
            assert not mine.levels[~columns.keep].any()


def test_a_span_leaves_the_other_columns_alone(device: torch.device) -> None:
    columns = random_columns(60, 16, False, False, device)
    before = columns.work.clone()
    round_columns(columns.work, columns, 20, 40, INT4)
    assert torch.equal(columns.work[:20], before[:20])
    assert torch.equal(columns.work[40:], before[40:])
    assert not columns.levels[40:].any() and not columns.levels[:20].any()
    assert columns.levels[20:40].any()
