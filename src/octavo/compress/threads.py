"""Many small operations run better without a team of threads behind each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def one_thread_an_operation() -> Iterator[int]:
    """torch uses one thread in an operation while this lasts; gives the number it had before.

    A team meets at a barrier after every operation. Where another process takes one of the cores, each barrier waits
    for the scheduler, and hundreds of thousands of them took 400 s instead of 10.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def map_in_threads(function: Callable[[int], T], count: int) -> list[T]:
    """function(0), ..., function(count - 1), several at a time, each in a thread of its own; results in order."""
    with one_thread_an_operation() as threads:
        if threads == 1 or count == 1:
            return [function(index) for index in range(count)]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(function, range(count)))
