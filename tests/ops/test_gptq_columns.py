"""GPTQ's columns by the compiled kernel, against the plain loop."""

from __future__ import annotations

import pytest
import torch
from gptq_cases import E4M3, INT4, assert_same, copy_of, plain, random_columns

from octavo.ops.cpu import library
from octavo.ops.gptq_columns import _compiled

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))


@compiled
@pytest.mark.parametrize(("asymmetric", "masked"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("count", "rows"), [(1, 1), (40, 37), (150, 8), (64, 200)])
def test_the_kernel_does_what_the_plain_loop_does(asymmetric, masked, count, rows):
    columns = random_columns(count, rows, asymmetric, masked, CPU)
    mine = copy_of(columns)
    assert _compiled(mine.work, mine, 0, count, INT4) is None
    assert_same(mine, *plain(columns, INT4))


@compiled
def test_a_span_leaves_the_other_columns_alone():
    columns = random_columns(60, 70, False, False, CPU)
    before = columns.work.clone()
    assert _compiled(columns.work, columns, 20, 40, INT4) is None
    assert torch.equal(columns.work[:20], before[:20])
    assert torch.equal(columns.work[40:], before[40:])
    assert not columns.levels[40:].any() and not columns.levels[:20].any()
    assert columns.levels[20:40].any()


@compiled
def test_floats_are_left_to_torch():
    columns = random_columns(4, 4, False, False, CPU)
    assert _compiled(columns.work, columns, 0, 4, E4M3) is NotImplemented
