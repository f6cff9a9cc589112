"""The `usage` object of answers and chunks."""

from __future__ import annotations

from typing import Any

from octavo.server.config import ServerConfig
from octavo.server.generation import Delta
from octavo.server.protocol import SamplingFields


class UsageMeter:
    """Counts the tokens of one answer: each prompt once, whatever n is, and every token that was generated."""

    def __init__(self, prompt_tokens: int, *, with_details: bool) -> None:
        self._prompt_tokens = prompt_tokens
        self._with_details = with_details
        self._generated: dict[int, int] = {}
        self._cached: dict[int, int] = {}

    def add(self, delta: Delta, prompt_index: int, *, num_tokens: int | None = None) -> None:
        """`num_tokens` replaces the delta's count where the client asked for none (echo of the prompt alone)."""
        self._generated[delta.index] = delta.num_tokens if num_tokens is None else num_tokens
        # Later samples of a prompt hit the blocks of the first; the prompt's own hits are the least of them.
        self._cached[prompt_index] = min(
            self._cached.get(prompt_index, delta.num_cached_tokens), delta.num_cached_tokens
        )

    def json(self) -> dict[str, Any]:
        completion = sum(self._generated.values())
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }
        if self._with_details:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached.values())}
        return usage


class StreamUsage:
    """When a stream reports usage: in a chunk of its own at the end, and with every chunk."""

    def __init__(self, request: SamplingFields, config: ServerConfig) -> None:
        options = request.stream_options
        forced = config.enable_force_include_usage
        self.at_end = forced or bool(options and options.include_usage)
        self.always = forced or (self.at_end and bool(options and options.continuous_usage_stats))
