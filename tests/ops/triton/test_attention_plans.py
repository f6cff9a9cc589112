"""The plans built at the start are all that steps ask for, and few."""

from __future__ import annotations

import itertools
import random

import pytest

from octavo.ops.triton import attention_plans
from octavo.ops.triton.attention_plans import Plan, cut_step, plan_of, plans


def asked_for(heads: int, rows: list[int], contexts: list[int]) -> set[Plan]:
    """The plans of one step, as `attention_cudnn` asks for them."""
    asked = set()
    for piece in cut_step(heads, rows, contexts):
        if piece.by_cudnn:
            past = piece.context - piece.rows
            asked.add(plan_of(1 if past else piece.num_requests, piece.rows, piece.rows, True))
            asked |= {plan_of(1, piece.rows, past, False)} if past else set()
    return asked


def random_step(choose: random.Random, max_rows: int, max_context: int, max_requests: int) -> tuple[list[int], ...]:
    rows, contexts = [], []
    while sum(rows) < max_rows and len(rows) < max_requests and (not rows or choose.random() < 0.9):
        left = min(max_rows - sum(rows), max_context)
        some = choose.choice((left, choose.randint(1, left), 1 << choose.randrange(left.bit_length())))
        past = choose.choice((0, 0, choose.randint(0, max_context - some), min(1, max_context - some)))
        count = choose.randint(1, min((max_rows - sum(rows)) // some, max_requests - len(rows)))
        count = choose.choice((1, count))
        rows += [some] * count
        contexts += [some + past] * count
    return rows, contexts


@pytest.mark.parametrize("heads", [2, 9, 16, 32, 64])
@pytest.mark.parametrize(
    ("max_rows", "max_context", "max_requests"),
    [(16384, 32768, 256), (8192, 131072, 64), (16000, 5000, 8), (2048, 2048, 1), (10000, 40960, 1000), (100, 50, 4)],
)
def test_no_step_asks_for_a_plan_that_is_not_built(
    heads: int, max_rows: int, max_context: int, max_requests: int
) -> None:
    built = set(plans(heads, max_rows, max_context, max_requests))
    choose = random.Random(heads)
    asked = set()
    for _ in range(2000):
        step = random_step(choose, max_rows, max_context, max_requests)
        asked |= asked_for(heads, *step)
    assert asked <= built
    if max_rows == 16384:
        assert len(asked) > len(built) // 2  # the steps reach what the plans are for


def test_plans_take_less_than_two_seconds_of_the_start() -> None:
    assert len(plans(32, 16384, 32768, 256)) <= 18  # some 0.1 s each


@pytest.mark.parametrize("seed", range(20))
def test_pieces_hold_every_request_once_and_in_order(seed: int) -> None:
    choose = random.Random(seed)
    rows, contexts = random_step(choose, 16384, 32768, 64)
    first = 0
    pieces = cut_step(32, rows, contexts)
    for piece in pieces:
        end = first + piece.num_requests
        assert sum(rows[first:end]) == piece.total_rows
        if piece.by_cudnn:
            assert set(zip(rows[first:end], contexts[first:end], strict=True)) == {(piece.rows, piece.context)}
        first = end
    assert first == len(rows)
    assert all(a.by_cudnn or b.by_cudnn for a, b in itertools.pairwise(pieces))  # one launch, not two


def test_what_is_short_is_left_to_the_other_kernel() -> None:
    def is_long(rows: int, context: int, count: int = 1) -> bool:
        return any(piece.by_cudnn for piece in cut_step(32, [rows] * count, [context] * count))

    assert is_long(2048, 2048, 4) and not is_long(2048, 2048, 3) and not is_long(2047, 2047, 8)
    assert is_long(2049, 2049) and not is_long(2048, 2048)
    assert is_long(4097, 30000) and not is_long(4097, 4097 + attention_plans.MIN_PAST - 1)
    assert not is_long(512, 2048, 32)
