"""Columns for GPTQ's inner loop, and what should become of them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.gptq_columns import Columns, Levels, round_to_levels

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


def assert_same(columns: Columns, levels: Tensor, errors: Tensor) -> None:
    """What was written into `columns` is what is expected; a tie that falls the other way changes what follows."""
    close = torch.isclose(columns.levels, levels, atol=1e-4) & torch.isclose(columns.errors, errors, atol=1e-3)
    assert close.float().mean() > 0.98
    if columns.keep is not None:
        assert not columns.levels[~columns.keep].any()


def copy_of(columns: Columns) -> Columns:
    return Columns(*(None if part is None else part.clone() for part in columns))  # type: ignore[arg-type]
