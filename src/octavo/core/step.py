"""What the scheduler hands to the runner: plain data, valid until the step is updated or failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.block_pool import Block
from octavo.core.request import Request

IN_FLIGHT_TOKEN = -1
"""Stands in `token_ids` for a token that a step in flight is still sampling."""


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One request's share of a step: positions `start` to `start + num_tokens - 1`.

    token_ids: the `num_tokens` inputs (IN_FLIGHT_TOKEN where the device knows better). block_ids: the request's whole
    table a cache group, live and append-only, so do not change it. sample: whether the last row's logits give a new
    token. num_drafts: so many last inputs are guesses; all rows from the one before them on are sampled, and the step
    brings one token more than it accepts of them. num_prompt_logprob_rows: so many rows, from `prompt_logprob_start -
    start` on, give the logprobs of the prompt tokens at positions `prompt_logprob_start + 1` and following.
    """

    request: Request
    start: int
    num_tokens: int
    token_ids: list[int]
    block_ids: list[list[int]]
    sample: bool
    num_drafts: int = 0
    prompt_logprob_start: int = 0
    num_prompt_logprob_rows: int = 0

    @property
    def is_void(self) -> bool:
        """Whether the results are to be dropped: the request has ended, or will be computed again."""
        return self.request.is_finished or self.request.discards_in_flight


@dataclass(slots=True, eq=False)
class Step:
    """One forward pass: its requests with one token (decodes) come first.

    `kv_tokens` counts the tokens that the cache had room for in blocks held by requests, before this step.
    `published` lists the blocks that became findable because this step fills them; they are withdrawn if it fails.
    """

    id: int
    requests: list[ScheduledRequest] = field(default_factory=list)
    num_tokens: int = 0
    num_decodes: int = 0
    kv_tokens: int = 0
    published: list[tuple[Request, Block]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. Prefix figures and preemptions are totals since the start; prefix figures are in tokens."""

    running: int
    waiting: int
    steps_in_flight: int
    kv_usage: float
    blocks_total: int
    blocks_free: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    steps: int
