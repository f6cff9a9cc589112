"""What bounds a server: how many sequences it holds, and how large a request may be."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from octavo.errors import QueueFullError
from octavo.server.errors import ApiError, bad_request

MAX_RETRY_AFTER_S = 60
_SMOOTHING = 0.1  # weight of the newest request in the mean duration

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ServerFullError(QueueFullError):
    """As QueueFullError, with the seconds after which a retry is likely to be let in."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Admission:
    """Counts the sequences that the engine holds for this server, running or waiting, and refuses more than a bound.

    A request with `n` answers or several prompts counts once for each sequence, and is let in as a whole or not at all.
    """

    def __init__(self, max_num_seqs: int, max_num_queued: int, on_reject: Callable[[], None] = lambda: None) -> None:
        self.max_num_seqs = max_num_seqs
        self.capacity = max_num_seqs + max_num_queued
        self.in_flight = 0
        self._on_reject = on_reject
        self._mean_seconds = 1.0

    def check(self, num_sequences: int = 1) -> None:
        """Raise ServerFullError (503) when they do not fit now, ApiError (400) when they never can."""
        if num_sequences > self.capacity:
            raise bad_request(
                f"the request asks for {num_sequences} sequences (prompts times n); this server holds at most "
                f"{self.capacity} (max_num_seqs plus max_num_queued_reqs): send fewer prompts a request, or a smaller n"
            )
        if self.in_flight + num_sequences > self.capacity:
            self._on_reject()
            raise ServerFullError(
                f"the queue is full: {self.in_flight} sequences are running or waiting and {num_sequences} more would "
                f"pass the bound of {self.capacity} (max_num_seqs plus max_num_queued_reqs); retry later",
                self.retry_after(),
            )

    def enter(self, num_sequences: int) -> None:
        self.check(num_sequences)
        self.in_flight += num_sequences

    def leave(self, started: float) -> None:
        """One sequence ended that had entered at `started` (time.monotonic)."""
        self.in_flight -= 1
        self._mean_seconds += _SMOOTHING * (time.monotonic() - started - self._mean_seconds)

    def retry_after(self) -> int:
        """Seconds until the first sequence of today's queue is likely done: queue length over the rate of ending."""
        ahead = max(1, self.in_flight - self.max_num_seqs)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(ahead * self._mean_seconds / self.max_num_seqs)))


async def read_body(receive: Receive, content_length: str | None, max_bytes: int) -> bytes:
    """The whole body; ApiError 413 as soon as it is known to be longer than `max_bytes`."""
    if content_length is not None and content_length.isdigit() and int(content_length) > max_bytes:
        raise _too_large(int(content_length), max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client closed the connection before the body was complete")
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(size, max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(size: int, max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has {size} bytes or more; at most {max_bytes} are allowed (--max-body-bytes)")
