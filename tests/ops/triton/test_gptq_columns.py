"""GPTQ's columns by the kernel against torch's operations, and both against the plain loop."""

from __future__ import annotations

import pytest
import torch
from gptq_cases import E2M1, E4M3, INT4, assert_same, copy_of, plain, random_columns

from octavo.ops.gptq_columns import Levels, _reference
from octavo.ops.triton.gptq_columns import round_columns


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
        mine = copy_of(columns)
        run(mine.work, mine, 0, count, number)
        assert_same(mine, levels, errors)


def test_a_span_leaves_the_other_columns_alone(device: torch.device) -> None:
    columns = random_columns(60, 16, False, False, device)
    before = columns.work.clone()
    round_columns(columns.work, columns, 20, 40, INT4)
    assert torch.equal(columns.work[:20], before[:20])
    assert torch.equal(columns.work[40:], before[40:])
    assert not columns.levels[40:].any() and not columns.levels[:20].any()
    assert columns.levels[20:40].any()
