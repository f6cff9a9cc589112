"""What a caller of `LLM` receives: vLLM's objects, field for field."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position, from the raw logits; rank 1 is the most probable."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` answers."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request with all its answers. `prompt_logprobs[i]` belongs to prompt token i; it is None for the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its numbers."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A text with its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
