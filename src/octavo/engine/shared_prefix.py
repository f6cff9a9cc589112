"""Which leading tokens the requests of a step have in common, blocks of the prefix cache that all of them hold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from octavo.core.step import ScheduledRequest

MIN_REQUESTS = 16
MIN_TOKENS = 256
"""Fewer requests, or fewer tokens that they share, are no faster for kernels that read those once."""


def num_shared_tokens(requests: Sequence[ScheduledRequest], block_size: int) -> int:
    """Leading tokens that are in the same blocks for all these requests, whole blocks; 0 where they are too few.

    A block that two requests hold at the same place stands for the same tokens before it, wherever those are: the
    prefix cache finds blocks by the tokens up to their end. For models with one cache group that keeps all tokens.
    """
    if len(requests) < MIN_REQUESTS:
        return 0
    first, *others = (item.block_ids[0] for item in requests)
    count = min(item.start for item in requests) // block_size  # the newest token is in none of them
    for blocks in others:
        if count * block_size < MIN_TOKENS:
            return 0
        if blocks[count - 1] != first[count - 1]:
            count = bisect_left(range(count), True, key=lambda i: blocks[i] != first[i])
    return count * block_size if count * block_size >= MIN_TOKENS else 0
