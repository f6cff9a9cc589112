"""Which calls of cuDNN's attention a step makes: of so few shapes that all their plans are built before any request.

torch builds a plan for every shape that is new, 160 ms each on an H200, and rounds numbers of rows and of keys up to
powers of two (`attention_cudnn`), but not the number of requests a call takes. So long prompts go one by one, and only
equal prompts of a power of two tokens that fill half a step together; a chunk after a past pays where both are long.
The rest goes to the Triton kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

MIN_ROWS = 2049  # of a prompt alone: fewer leave multiprocessors without work
MIN_EQUAL_ROWS = 2048  # of each of several equal prompts, and of all of them
MIN_TOTAL_ROWS = 8192
MIN_SCORES = 60_000_000  # from as many on, the products save more than gathering and small launches cost
MIN_ROWS_AFTER_PAST = 4097  # two calls and a merge: 4 x 1,024 after 1,024 took three times as long as in Triton
MIN_PAST = 2049
MIN_SCORES_AFTER_PAST = 1_000_000_000


class Piece(NamedTuple):
    """Neighbours in a step; those of cuDNN have `rows` new tokens each at the end of `context`, others any number."""

    by_cudnn: bool
    num_requests: int
    total_rows: int
    rows: int = 0
    context: int = 0


class Plan(NamedTuple):
    """A call by its shape: `rows` and `keys` are powers of two, exactly these or all above the next smaller one."""

    batch: int
    rows: int
    keys: int
    is_causal: bool
    is_exact: bool


def cut_step(heads: int, lengths: list[int], contexts: list[int]) -> list[Piece]:
    """The pieces of a step of requests with these numbers of new tokens and of tokens in all, in order."""
    pieces: list[Piece] = []
    for (rows, context), run in groupby(zip(lengths, contexts, strict=True)):
        left = len(list(run))
        for count in _counts(heads, rows, context, left):
            pieces.append(Piece(True, count, count * rows, rows, context))
            left -= count
        if left:
            before = pieces.pop() if pieces and not pieces[-1].by_cudnn else Piece(False, 0, 0)
            pieces.append(Piece(False, before.num_requests + left, before.total_rows + left * rows))
    return pieces


def _counts(heads: int, rows: int, context: int, count: int) -> Iterator[int]:
    """How many of `count` equal requests each call takes, as long as calls pay."""
    if rows < context:
        yield from [count] if count and _pays_after_past(heads, rows, context - rows) else []
        return
    while count:
        most = 1 << (count.bit_length() - 1)
        most = most if _pays(heads, rows, most) else 1
        if not _pays(heads, rows, most):
            return
        yield most
        count -= most


def _pays(heads: int, rows: int, count: int) -> bool:
    if count == 1:
        return rows >= MIN_ROWS and heads * rows * (rows - rows // 2) >= MIN_SCORES
    is_exact = rows == round_up(rows) and rows >= MIN_EQUAL_ROWS
    return is_exact and count * rows >= MIN_TOTAL_ROWS


def _pays_after_past(heads: int, rows: int, past: int) -> bool:
    long = rows >= MIN_ROWS_AFTER_PAST and past >= MIN_PAST
    return long and heads * rows * (past + rows - rows // 2) >= MIN_SCORES_AFTER_PAST


def round_up(n: int) -> int:
    """The power of two that torch rounds n >= 1 up to."""
    return 1 << (n - 1).bit_length()


def plan_of(batch: int, rows: int, keys: int, is_causal: bool) -> Plan:
    """The plan of a call; where so many rows are a power of two it is its own, and faster (no lengths in tensors)."""
    is_exact = is_causal and rows == keys == round_up(rows) and batch * rows >= MIN_TOTAL_ROWS
    return Plan(batch, round_up(rows), round_up(keys), is_causal, is_exact)


def plans(heads: int, max_rows: int, max_context: int, max_requests: int) -> list[Plan]:
    """Every plan that the pieces of steps may ask for, of up to `max_rows` rows and `max_requests` requests."""
    found: dict[Plan, None] = {}
    longest = min(max_rows, max_context)
    for rows in _powers(MIN_EQUAL_ROWS, longest):
        for batch in _powers(2, min(max_requests, max_rows // rows)):
            found |= {plan_of(batch, rows, rows, True): None} if _pays(heads, rows, batch) else {}
    for rows in _powers(round_up(MIN_ROWS), round_up(longest)):
        least, most = rows // 2 + 1, min(rows, longest)
        if _pays(heads, most, 1):
            found |= {plan_of(1, n, n, True): None for n in (least, most)}
        for past in _powers(round_up(MIN_PAST), round_up(max_context)):
            if _pays_after_past(heads, most, min(past, max_context - least)):
                found |= {plan_of(1, n, n, True): None for n in (least, most)}
                found[plan_of(1, least, past, False)] = None
    return list(found)


def _powers(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2
