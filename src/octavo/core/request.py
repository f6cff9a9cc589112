"""A request is three counters over one list of tokens; its phases are properties of them.

    tokens   |============ known = prompt + sampled ============|... pending: samples of steps in flight
    KV       |== computed ==|== scheduled (in flight) ==| next chunk ->

Prefill, chunked prefill, decode, a prefix hit and a recompute after preemption are one rule: `computed` catches up
to `known`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from octavo.core.sampling_params import SamplingParams
from octavo.errors import UserError

NEVER = 1 << 62


class RequestStatus(enum.Enum):
    """Where a request is; PREEMPTED waits like WAITING but has been running before."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """One sequence to be continued. The scheduler owns every field; others only read.

    `tokens` holds the prompt and what was sampled. `finish_reason` is None until the end, then "stop", "length",
    "abort" or "error"; `stop_reason` is the stop string or stop token id that ended it (None for the end-of-sequence
    token), `error` the message of a failed step. `num_cached_tokens` counts the prompt tokens that the prefix cache
    spared at the first admission. `embeds`: the hidden state of its last prompt token is wanted, and no answer, so that
    the prompt may fill the context.
    """

    __slots__ = (
        "admission_need",
        "admitted_step",
        "arrival_time",
        "block_keys",
        "cache_salt",
        "computed",
        "discards_in_flight",
        "drafts",
        "embeds",
        "eos_token_ids",
        "error",
        "finish_reason",
        "in_flight",
        "is_draining",
        "max_length",
        "min_length",
        "num_cached_tokens",
        "num_hit_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_published",
        "params",
        "pending",
        "priority",
        "publish_at",
        "request_id",
        "room",
        "scheduled",
        "sort_key",
        "status",
        "stop_reason",
        "stop_token_ids",
        "tables",
        "tokens",
        "window_starts",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        embeds: bool = False,
    ) -> None:
        self.request_id = request_id
        self.tokens = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.params = params
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.embeds = embeds
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_token_ids = self.eos_token_ids | frozenset(params.stop_token_ids or ())
        self._check_prompt()
        self.min_length = self.num_prompt_tokens + params.min_tokens
        self.max_length = NEVER  # set by the scheduler, which knows the context length
        self.sort_key: tuple[int, float, int] = (0, 0.0, 0)
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.computed = 0
        self.scheduled = 0
        self.pending = 0  # tokens that the steps in flight will sample
        self.drafts: list[int] = []  # guesses for the next step, beyond `known`
        self.in_flight = 0  # steps in flight that hold this request
        self.is_draining = False  # left the running set, but its blocks wait for steps in flight
        self.discards_in_flight = False  # the results of the steps in flight are void
        self.tables: list[list[int]] = []
        self.window_starts: list[int] = []  # a group: leading table entries that are the null block already
        self.room = 0  # tokens that the tables have slots for
        self.block_keys: list[bytes] = []
        self.num_published = 0
        self.publish_at = NEVER  # the token count at which the next block is full
        self.admitted_step = -1
        self.admission_need = 0  # free blocks that the last attempt at admission lacked
        self.num_hit_tokens = 0  # of the current admission
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0  # prompt positions whose logprobs are delivered

    def _check_prompt(self) -> None:
        if not self.tokens:
            raise UserError(
                f"the prompt of request {self.request_id!r} is empty (0 tokens); it needs at least 1 token: "
                "give some text, or the beginning-of-sequence token",
                param="prompt",
            )
        if set(map(type, self.tokens)) != {int}:
            raise UserError("a prompt given as token ids must be a list of integers", param="prompt")
        low, high = min(self.tokens), max(self.tokens)
        if low < 0 or high >= 1 << 31:
            bad = low if low < 0 else high
            raise UserError(
                f"the prompt holds the token id {bad}; ids are not negative and below 2**31", param="prompt"
            )

    @property
    def known(self) -> int:
        """Tokens whose ids the host knows: the prompt and what was sampled."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt (a copy)."""
        return self.tokens[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """What was sampled (a copy)."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.finish_reason is not None

    def append(self, token: int) -> str | None:
        """Append a sampled token; returns the finish reason if that ends the request, "stop" or "length"."""
        self.tokens.append(token)
        length = len(self.tokens)
        if token in self.stop_token_ids and length >= self.min_length:
            self.stop_reason = None if token in self.eos_token_ids else token
            return "stop"
        return "length" if length >= self.max_length else None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, computed={self.computed}, known={self.known}, "
            f"scheduled={self.scheduled}, pending={self.pending}, finish_reason={self.finish_reason})"
        )
