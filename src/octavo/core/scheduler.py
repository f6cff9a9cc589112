"""Continuous batching with chunked prefill, prefix caching and preemption by recompute.

A step has a token budget. Running requests come first, oldest first; each decode has its token set aside, and what is
left goes to prefill chunks and then to admissions. Out of blocks, the youngest (or least urgent) running request is
preempted. `schedule` may run ahead of `update` by `max_steps_in_flight` steps: then the newest token of a request is a
placeholder.

The mechanisms are those of vLLM's scheduler (Kwon et al. 2023, arXiv 2309.06180; chunked prefill: Agrawal et al. 2024,
arXiv 2403.02310).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from octavo.core.cache_groups import CacheGroup
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.prefill_cap import prefill_cap_of
from octavo.core.request import Request, RequestStatus
from octavo.core.request_states import RequestStates
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.step import ScheduledRequest, SchedulerStats, Step
from octavo.core.step_builder import StepBuilder
from octavo.errors import CapacityError, UserError

__all__ = ["ScheduledRequest", "Scheduler", "SchedulerConfig", "SchedulerStats", "Step"]

_RUNNING, _FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED


class Scheduler:
    """Owns the requests and the block pool. Not thread-safe: one engine loop calls it."""

    def __init__(self, config: SchedulerConfig, groups: Sequence[CacheGroup], num_blocks: int) -> None:
        self.config = config
        self.prefill_cap = prefill_cap_of(config)
        self.cache = KVCacheManager(groups, num_blocks, config.block_size, config.enable_prefix_caching)
        self.states = RequestStates(self.cache)
        self._in_flight: deque[Step] = deque()
        self._num_added = 0
        self._next_step_id = 0
        self._prefix_queries = self._prefix_hits = 0

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. UserError (CapacityError) with the numbers if it can never fit."""
        if request.request_id in self.states.requests:
            raise UserError(
                f"a request with the id {request.request_id!r} is still running; ids must be unique", param="request_id"
            )
        if request.priority != 0 and self.config.policy == "fcfs":
            raise UserError(
                f"priority is {request.priority}, but the scheduling policy is 'fcfs', which has none: "
                "leave it 0 or start with the policy 'priority'",
                param="priority",
            )
        request.max_length = self._max_length(request)
        order = (request.priority, request.arrival_time) if self.config.policy == "priority" else (0, 0.0)
        request.sort_key = (*order, self._num_added)
        self._num_added += 1
        self.states.add(request)

    def _max_length(self, request: Request) -> int:
        """Prompt plus output at most; refuses what cannot fit in the context or in the pool."""
        limit, prompt = self.config.max_model_len + request.embeds, request.num_prompt_tokens
        if prompt + 1 > limit:
            raise CapacityError(
                f"the prompt has {prompt} tokens, but the context holds {limit} and one is needed for the output: "
                f"shorten the prompt to at most {limit - 1} tokens, set truncate_prompt_tokens, or raise max_model_len",
                param="prompt",
            )
        wanted = request.params.max_tokens
        max_length = limit if wanted is None else min(limit, prompt + wanted)
        need, usable = self.blocks_for(max_length), self.cache.pool.num_usable
        if need > usable:
            size = self.config.block_size
            raise CapacityError(
                f"{prompt} prompt tokens and up to {max_length - prompt} new ones need {need} KV cache blocks of "
                f"{size} tokens, but the cache has {usable}: lower max_tokens, or start with a larger KV cache",
                param="max_tokens",
            )
        return max_length

    def blocks_for(self, length: int) -> int:
        """Blocks that a request of `length` tokens, prompt and output, may hold at once (the last takes no slot)."""
        in_flight = self.config.max_num_batched_tokens * self.config.max_steps_in_flight
        return self.cache.max_blocks(length - 1, in_flight)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; tokens still in flight are dropped. None if it has ended already (not an error)."""
        return self.finish(request_id, "abort")

    def finish(
        self, request_id: str, reason: str, stop_reason: int | str | None = None, error: str | None = None
    ) -> Request | None:
        """End a request from outside: "stop" at a stop string, "abort", or "error". None if it has ended already.

        After an error (logits that are not finite, say) its blocks are not found any more, so that it fails alone.
        """
        request = self.states.requests.get(request_id)
        if request is not None:
            request.stop_reason, request.error = stop_reason, error
            if reason == "error":
                self.cache.withdraw(request)
            self.states.finish(request, reason)
        return request

    def propose(self, request_id: str, drafts: Sequence[int]) -> None:
        """Guess the next tokens of a running request; the next step checks as many as its budget takes.

        Only for a request with no step in flight and one token to go. What the step does not accept leaves no trace:
        `computed` rolls back, and no block is published for it.
        """
        request = self.states.requests[request_id]
        if request.status is not _RUNNING or request.in_flight or request.computed != request.known - 1:
            raise ValueError(f"{request} cannot take drafts now")
        request.drafts = list(drafts[: request.max_length - 1 - request.known])

    def has_work(self) -> bool:
        """Whether a request has not ended or a step is in flight."""
        return bool(self.states.requests or self._in_flight)

    def stats(self) -> SchedulerStats:
        """A snapshot of the load, and totals since the start."""
        pool, states = self.cache.pool, self.states
        return SchedulerStats(
            running=len(states.requests) - len(states.waiting),
            waiting=len(states.waiting),
            steps_in_flight=len(self._in_flight),
            kv_usage=pool.usage,
            blocks_total=pool.num_usable,
            blocks_free=pool.num_free,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=states.num_preemptions,
            steps=self._next_step_id,
        )

    # -- steps ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run before a step in flight is updated (or there is nothing to do)."""
        if len(self._in_flight) >= self.config.max_steps_in_flight or not self.states.requests:
            return None
        step = Step(self._next_step_id)
        builder = StepBuilder(self.config, self.states, step, self.prefill_cap)
        if builder.build() is None:
            return None
        self._next_step_id += 1
        self._in_flight.append(step)
        for request in builder.first_admissions:
            self._prefix_queries += request.num_prompt_tokens
            self._prefix_hits += request.num_cached_tokens
        return step

    def observe(self, step: Step, seconds: float) -> None:
        """A step took so long (any time after `schedule` gave it): what the cap on prefills may learn from."""
        self.prefill_cap.observe(step, seconds)

    def update(self, step: Step, sampled: dict[str, list[int]]) -> list[Request]:
        """Take the results of the oldest step in flight; returns the requests that got tokens, ended ones among them.

        `sampled` has a list of tokens for every request of the step with `sample` set. Tokens after one that ends the
        request are dropped, as is everything for requests that ended meanwhile.
        """
        if not self._in_flight or self._in_flight[0] is not step:
            raise ValueError(f"step {step.id} is not the oldest step in flight")
        self._in_flight.popleft()
        touched: list[Request] = []
        for item in step.requests:
            request = item.request
            request.in_flight -= 1
            if request.status is _FINISHED or request.discards_in_flight:
                if not request.in_flight:
                    self.states.release(request)
                continue
            request.computed += item.num_tokens
            request.scheduled -= item.num_tokens
            reason = None
            if item.sample:
                reason = self._accept(item, sampled[request.request_id])
                touched.append(request)
            if item.num_prompt_logprob_rows:
                request.num_prompt_logprobs = item.prompt_logprob_start + item.num_prompt_logprob_rows
            if request.computed >= request.publish_at:
                self.cache.publish(request, request.computed)
            if reason is not None:
                self.states.finish(request, reason)
            elif request.is_draining and not request.in_flight:
                self.states.release(request)
        return touched

    def _accept(self, item: ScheduledRequest, tokens: Sequence[int]) -> str | None:
        """Append what a step sampled, up to a token that ends the request; returns the finish reason if one does."""
        request = item.request
        request.pending -= 1
        known, reason = request.known, None
        for token in tokens:
            reason = request.append(token)
            if reason is not None:
                break
        if item.num_drafts:
            request.computed -= item.num_drafts + 1 - (request.known - known)  # roll back what was rejected
        return reason

    def fail(self, step: Step, reason: str) -> list[Request]:
        """A step failed: what it wrote is void. Its requests end with "error"; returns those that had not ended.

        Requests of later steps in flight that were admitted on blocks of the failed step are computed again.
        """
        self._in_flight.remove(step)
        involved = [item.request for item in step.requests]
        later = [other for other in self._in_flight if other.id > step.id]
        dependent = _admitted_on_hits_after(step, later)
        self._withdraw_keys([step, *later], {*involved, *dependent})
        failed = [request for request in involved if request.status is not _FINISHED]
        for request in involved:
            request.in_flight -= 1
            if request.status is not _FINISHED:
                request.error = reason
                self.states.finish(request, "error")
            elif not request.in_flight:
                self.states.release(request)
        for request in dependent:
            if request.status is not _FINISHED:
                self.states.recompute(request)
        return failed

    def _withdraw_keys(self, steps: Iterable[Step], writers: set[Request]) -> None:
        """Make the blocks that `writers` fill in `steps` unfindable."""
        for step in steps:
            for request, block in step.published:
                if request in writers:
                    self.cache.pool.withdraw(block)


def _admitted_on_hits_after(step: Step, later: Iterable[Step]) -> list[Request]:
    """Requests of later steps whose prefix hit may hold blocks of `step`, without repeats and in order."""
    found: dict[Request, None] = {}
    for other in later:
        for item in other.requests:
            if item.request.admitted_step > step.id and item.request.num_hit_tokens:
                found[item.request] = None
    return list(found)
