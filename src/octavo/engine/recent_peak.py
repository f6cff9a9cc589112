"""The greatest of the values that were told lately."""

from __future__ import annotations

import time
from collections import deque


class RecentPeak:
    """The maximum over a sliding window of `seconds`. Those stay in the queue that no later one exceeds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entries: deque[tuple[float, float]] = deque()  # when it was told, and the value; values descend

    def add(self, value: float) -> None:
        while self._entries and self._entries[-1][1] <= value:
            self._entries.pop()
        self._entries.append((time.monotonic(), value))

    def most(self, default: float) -> float:
        """`default` where nothing was told within the window."""
        oldest = time.monotonic() - self._seconds
        while self._entries and self._entries[0][0] < oldest:
            self._entries.popleft()
        return self._entries[0][1] if self._entries else default
