"""What is kept of every request, and the figures of one request that follow from it.

All times are perf_counter_ns. Latencies count from `scheduled_ns`, when the request should have been sent, so a client
or a server that falls behind cannot hide it (no coordinated omission). In closed loops that is when the stream became
free.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """One request: when things happened, what was counted, how it ended."""

    index: int
    scheduled_ns: int
    sent_ns: int = 0
    first_byte_ns: int = 0
    end_ns: int = 0
    token_ns: array[int] = field(default_factory=lambda: array("q"))  # arrival of each chunk that brought tokens
    status: str = "cancelled"  # completed | failed | cancelled
    error_kind: str | None = None
    error: str | None = None
    requested_prompt: int | None = None
    requested_output: int | None = None
    prompt_tokens: int | None = None  # as the server counted (usage)
    output_tokens: int = 0
    has_usage: bool = False
    cached_tokens: int | None = None
    is_repeated_prompt: bool = False

    @property
    def is_completed(self) -> bool:
        return self.status == "completed"

    @property
    def ttft_ms(self) -> float | None:
        """Scheduled time to the arrival of the first token."""
        return (self.token_ns[0] - self.scheduled_ns) / 1e6 if self.token_ns else None

    @property
    def latency_ms(self) -> float:
        """Scheduled time to the end of the answer."""
        return (self.end_ns - self.scheduled_ns) / 1e6

    @property
    def queue_delay_ms(self) -> float | None:
        """How much later than scheduled the client sent it."""
        return (self.sent_ns - self.scheduled_ns) / 1e6 if self.sent_ns else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time a token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2 or len(self.token_ns) < 2:
            return None
        return (self.token_ns[-1] - self.token_ns[0]) / 1e6 / (self.output_tokens - 1)

    def gaps_ms(self) -> list[float]:
        """Every gap between two successive chunks that brought tokens."""
        times = self.token_ns
        return [(times[i] - times[i - 1]) / 1e6 for i in range(1, len(times))]

    def as_dict(self, origin_ns: int) -> dict[str, Any]:
        """The record as JSON, times in milliseconds from `origin_ns`."""

        def relative(value: int) -> float | None:
            return round((value - origin_ns) / 1e6, 4) if value else None

        return {
            "index": self.index,
            "status": self.status,
            "error_kind": self.error_kind,
            "error": self.error,
            "scheduled_ms": relative(self.scheduled_ns),
            "sent_ms": relative(self.sent_ns),
            "first_byte_ms": relative(self.first_byte_ns),
            "end_ms": relative(self.end_ns),
            "token_ms": [relative(t) for t in self.token_ns],
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "requested_output": self.requested_output,
            "cached_tokens": self.cached_tokens,
        }
