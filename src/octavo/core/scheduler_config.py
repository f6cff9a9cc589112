"""Limits that the scheduler keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.errors import UserError


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler; `UserError` names a bad value and its range.

    max_num_seqs: running requests at most. max_num_batched_tokens: tokens a step. max_model_len: prompt plus output of
    a request. block_size: tokens a KV block. policy: "fcfs", or "priority" (lower values first). max_prefill_tokens:
    prefill tokens of any step; what it leaves of the tokens a step is for decodes, so that a step full of prompts has
    the same size with them and without.
    max_prefill_tokens_with_decodes: prefill tokens of a step that also decodes, so that a long prompt does not stall
    the running streams; None leaves it to the next two, and with neither of them, as with 0, there is no cap.
    target_itl_ms: such a step takes no longer, by a model fitted to the steps so far (milliseconds). prefill_cap_range:
    the cap is a share of the prompt tokens that wait, between these two. max_steps_in_flight: how often `schedule` may
    be called before `update`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    max_prefill_tokens: int | None = None
    max_prefill_tokens_with_decodes: int | None = None
    target_itl_ms: float | None = None
    prefill_cap_range: tuple[int, int] | None = None
    max_steps_in_flight: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_steps_in_flight"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1", param=name)
        if self.max_model_len < 2:
            raise UserError(
                f"max_model_len is {self.max_model_len}; it must be at least 2, a prompt token and a new one",
                param="max_model_len",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs {self.max_num_seqs}: every "
                "running request decodes a token a step, so raise the first or lower the second",
                param="max_num_batched_tokens",
            )
        if self.max_prefill_tokens is not None and not 1 <= self.max_prefill_tokens <= self.max_num_batched_tokens:
            raise UserError(
                f"max_prefill_tokens is {self.max_prefill_tokens}; it must be from 1 to max_num_batched_tokens = "
                f"{self.max_num_batched_tokens}",
                param="max_prefill_tokens",
            )
        if self.policy not in ("fcfs", "priority"):
            raise UserError(f"policy is {self.policy!r}; it must be 'fcfs' or 'priority'", param="policy")
        if (self.max_prefill_tokens_with_decodes or 0) < 0:
            raise UserError(
                f"max_prefill_tokens_with_decodes is {self.max_prefill_tokens_with_decodes}; it must be at least 1, or "
                "0 for no cap",
                param="max_prefill_tokens_with_decodes",
            )
        if self.target_itl_ms is not None and not 0 < self.target_itl_ms < math.inf:
            raise UserError(f"target_itl_ms is {self.target_itl_ms}; it must be above 0", param="target_itl_ms")
        low, high = self.prefill_cap_range or (1, 1)
        if not 1 <= low <= high:
            raise UserError(
                f"prefill_cap_range is {self.prefill_cap_range}; it must be two numbers from 1 on, the lower one first",
                param="prefill_cap_range",
            )
