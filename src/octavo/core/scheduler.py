"""Picks the tokens of each step. Continuous batching with chunked prefill, prefix caching and preemption by recompute.

A step has a token budget. Running requests come first, oldest first; each decode has its token set aside, and what is
left goes to prefill chunks and then to admissions. Out of blocks, the youngest (or least urgent) running request is
preempted. `schedule` may run ahead of `update` by `max_steps_in_flight` steps: then the newest token of a request is a
placeholder. Blocks of a request that leaves the running set are freed once no step in flight writes them.

The mechanisms are those of vLLM's scheduler (Kwon et al. 2023, arXiv 2309.06180; chunked prefill: Agrawal et al. 2024,
arXiv 2403.02310).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence

from octavo.core.cache_groups import CacheGroup
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request, RequestStatus
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.step import IN_FLIGHT_TOKEN, ScheduledRequest, SchedulerStats, Step
from octavo.core.waiting_queue import WaitingQueue
from octavo.errors import CapacityError, UserError

__all__ = ["ScheduledRequest", "Scheduler", "SchedulerConfig", "SchedulerStats", "Step"]

_RUNNING, _FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED


class Scheduler:
    """Owns the requests and the block pool. Not thread-safe: one engine loop calls it."""

    def __init__(self, config: SchedulerConfig, groups: Sequence[CacheGroup], num_blocks: int) -> None:
        self.config = config
        self.max_prefill_tokens_with_decodes = config.max_prefill_tokens_with_decodes or 0  # may be changed any time
        self.cache = KVCacheManager(groups, num_blocks, config.block_size, config.enable_prefix_caching)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # by sort key: the last is preempted first
        self.waiting = WaitingQueue()
        self._in_flight: deque[Step] = deque()
        self._running_has_finished = False
        self._num_draining = 0
        self._num_added = 0
        self._next_step_id = 0
        self._prefix_queries = self._prefix_hits = self._preemptions = 0

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. UserError (CapacityError) with the numbers if it can never fit."""
        if request.request_id in self.requests:
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
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def _max_length(self, request: Request) -> int:
        """Prompt plus output at most; refuses what cannot fit in the context or in the pool."""
        limit, prompt = self.config.max_model_len, request.num_prompt_tokens
        if prompt + 1 > limit:
            raise CapacityError(
                f"the prompt has {prompt} tokens, but the context holds {limit} and one is needed for the output: "
                f"shorten the prompt to at most {limit - 1} tokens, set truncate_prompt_tokens, or raise max_model_len",
                param="prompt",
            )
        wanted = request.params.max_tokens
        max_length = limit if wanted is None else min(limit, prompt + wanted)
        in_flight = self.config.max_num_batched_tokens * self.config.max_steps_in_flight
        need, usable = self.cache.max_blocks(max_length - 1, in_flight), self.cache.pool.num_usable
        if need > usable:
            size = self.config.block_size
            raise CapacityError(
                f"{prompt} prompt tokens and up to {max_length - prompt} new ones need {need} KV cache blocks of "
                f"{size} tokens, but the cache has {usable}: lower max_tokens, or start with a larger KV cache",
                param="max_tokens",
            )
        return max_length

    def abort(self, request_id: str) -> Request | None:
        """End a request now; tokens still in flight are dropped. None if it has ended already (not an error)."""
        return self.finish(request_id, "abort")

    def finish(
        self, request_id: str, reason: str, stop_reason: int | str | None = None, error: str | None = None
    ) -> Request | None:
        """End a request from outside: "stop" at a stop string, "abort", or "error". None if it has ended already."""
        request = self.requests.get(request_id)
        if request is not None:
            request.stop_reason, request.error = stop_reason, error
            self._finish(request, reason)
        return request

    def has_work(self) -> bool:
        """Whether a request has not ended or a step is in flight."""
        return bool(self.requests or self._in_flight)

    def stats(self) -> SchedulerStats:
        """A snapshot of the load, and totals since the start."""
        pool = self.cache.pool
        return SchedulerStats(
            running=len(self.requests) - len(self.waiting),
            waiting=len(self.waiting),
            steps_in_flight=len(self._in_flight),
            kv_usage=pool.usage,
            blocks_total=pool.num_usable,
            blocks_free=pool.num_free,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
            steps=self._next_step_id,
        )

    # -- picking a step ------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run before a step in flight is updated (or there is nothing to do)."""
        if len(self._in_flight) >= self.config.max_steps_in_flight or not self.requests:
            return None
        step = Step(self._next_step_id)
        decodes: list[ScheduledRequest] = []
        prefills: list[ScheduledRequest] = []
        budget, prefill_left, lacks_blocks = self._schedule_running(step, decodes, prefills)
        if not lacks_blocks and prefill_left > 0 and len(self.waiting):
            budget = self._schedule_waiting(step, decodes, prefills, budget, prefill_left)
        if not decodes and not prefills:
            return None
        step.num_decodes = len(decodes)
        step.requests = decodes + prefills
        step.num_tokens = self.config.max_num_batched_tokens - budget
        self._next_step_id += 1
        self._in_flight.append(step)
        return step

    def _schedule_running(
        self, step: Step, decodes: list[ScheduledRequest], prefills: list[ScheduledRequest]
    ) -> tuple[int, int, bool]:
        """Returns the token budget left, how much of it prefills may take, and whether blocks ran out."""
        if self._running_has_finished:
            self.running = [request for request in self.running if request.status is _RUNNING]
            self._running_has_finished = False
        running = self.running
        # tokens that could be computed now; the last token of all is never an input, hence max_length - 1
        ready = [min(len(r.tokens) + r.pending, r.max_length - 1) - r.computed - r.scheduled for r in running]
        decodes_left = ready.count(1)
        budget = self.config.max_num_batched_tokens
        prefill_left = budget - decodes_left
        if decodes_left and self.max_prefill_tokens_with_decodes:
            prefill_left = min(prefill_left, self.max_prefill_tokens_with_decodes)
        lacks_blocks, index = False, 0
        while index < len(running):  # preemption takes requests off the end
            request, count = running[index], ready[index]
            index += 1
            if count != 1:
                count = min(count, prefill_left)
                if count <= 0:
                    continue
            end = request.computed + request.scheduled + count
            if end > request.room and not self.cache.grow(request, end):
                lacks_blocks = True
                if not self._make_room(request, end):
                    continue
            if count == 1:
                decodes.append(self._scheduled(step, request, count))
            else:
                prefills.append(self._scheduled(step, request, count))
                prefill_left -= count
            budget -= count
        return budget, min(prefill_left, budget), lacks_blocks

    def _make_room(self, request: Request, end: int) -> bool:
        """Preempt until the request's tables can cover `end` tokens; False if it has to wait or went itself.

        Blocks of requests that steps in flight still write come back soon, so then nothing more is preempted.
        """
        while not self._num_draining:
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
            if self.cache.grow(request, end):
                return True
        return False

    def _schedule_waiting(
        self,
        step: Step,
        decodes: list[ScheduledRequest],
        prefills: list[ScheduledRequest],
        budget: int,
        prefill_left: int,
    ) -> int:
        """Admit requests in order while there is room for their prompts; returns the token budget left."""
        while prefill_left > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            if request is None or request.in_flight or request.admission_need > self.cache.pool.num_free:
                break
            hit = self.cache.find_hit(request)
            start = hit.num_blocks * self.config.block_size
            count = min(request.known - start, prefill_left)
            if not self.cache.admit(request, hit, start + count):
                break
            self._admit(request, start, step)
            (decodes if count == 1 else prefills).append(self._scheduled(step, request, count))
            budget -= count
            prefill_left -= count
        return budget

    def _admit(self, request: Request, num_hit_tokens: int, step: Step) -> None:
        self.waiting.pop()
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_hit_tokens
            if self.config.enable_prefix_caching and request.params.prompt_logprobs is None:
                self._prefix_queries += request.num_prompt_tokens
                self._prefix_hits += num_hit_tokens
        request.status = _RUNNING
        request.admission_need = 0
        request.admitted_step = step.id
        request.num_hit_tokens = request.computed = num_hit_tokens
        insort(self.running, request, key=lambda r: r.sort_key)

    def _scheduled(self, step: Step, request: Request, count: int) -> ScheduledRequest:
        """Count the tokens as in flight and publish the blocks that they fill."""
        tokens = request.tokens
        known = len(tokens)
        start = request.computed + request.scheduled
        end = start + count
        if count == 1:
            inputs = [tokens[start] if start < known else IN_FLIGHT_TOKEN]
        else:
            inputs = tokens[start:end]
        sample = end == known + request.pending
        scheduled = ScheduledRequest(request, start, count, inputs, request.tables, sample)
        if end >= request.publish_at:
            # the write of K and V precedes attention in every layer, so even this step's other requests may read them
            for block in self.cache.publish(request, min(end, known)):
                step.published.append((request, block))
        request.scheduled += count
        request.in_flight += 1
        if sample:
            request.pending += 1
        if request.params.prompt_logprobs is not None:
            first = max(start, request.num_prompt_logprobs)
            scheduled.prompt_logprob_start = first
            scheduled.num_prompt_logprob_rows = max(0, min(end, request.num_prompt_tokens - 1) - first)
        return scheduled

    # -- what became of a step -----------------------------------------------------------------------------------

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
                    self._release(request)
                continue
            count = item.num_tokens
            request.computed += count
            request.scheduled -= count
            reason = None
            if item.sample:
                request.pending -= 1
                for token in sampled[request.request_id]:
                    reason = request.append(token)
                    if reason is not None:
                        break
                touched.append(request)
            if item.num_prompt_logprob_rows:
                request.num_prompt_logprobs = item.prompt_logprob_start + item.num_prompt_logprob_rows
            if request.computed >= request.publish_at:
                self.cache.publish(request, request.computed)
            if reason is not None:
                self._finish(request, reason)
            elif request.is_draining and not request.in_flight:
                self._release(request)
        return touched

    def fail(self, step: Step, reason: str) -> list[Request]:
        """A step failed: what it wrote is void. Its requests end with "error"; returns those that had not ended.

        Requests of later steps in flight that were admitted on blocks of the failed step are computed again.
        """
        self._in_flight.remove(step)
        later = [other for other in self._in_flight if other.id > step.id]
        involved = [item.request for item in step.requests]
        dependent = {
            item.request
            for other in later
            for item in other.requests
            if item.request.admitted_step > step.id and item.request.num_hit_tokens
        }
        tainted = dependent.union(involved)
        for other in (step, *later):
            for request, block in other.published:
                if request in tainted:
                    self.cache.pool.withdraw(block)
        failed = [request for request in involved if request.status is not _FINISHED]
        for request in involved:
            request.in_flight -= 1
            if request.status is not _FINISHED:
                request.error = reason
                self._finish(request, "error")
            elif not request.in_flight:
                self._release(request)
        for request in dependent:
            if request.status is not _FINISHED:
                self._recompute(request)
        return failed

    # -- leaving the running set ---------------------------------------------------------------------------------

    def _recompute(self, request: Request) -> None:
        """Start over, dropping what the steps in flight bring."""
        if request.status is _RUNNING:
            self.running.remove(request)
            self._preempt(request)
        request.discards_in_flight = True

    def _preempt(self, request: Request) -> None:
        """Move a request that was just taken off `running` back to the waiting ones."""
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._preemptions += 1
        self.waiting.push(request)
        self._drain(request)

    def _finish(self, request: Request, reason: str) -> None:
        was_running = request.status is _RUNNING
        request.status = _FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        if was_running:
            self._running_has_finished = True
        else:
            self.waiting.note_finished()
        self._drain(request)

    def _drain(self, request: Request) -> None:
        """Free the blocks, now or when the last step in flight that writes them is back."""
        if not request.in_flight:
            self._release(request)
        elif not request.is_draining:
            request.is_draining = True
            self._num_draining += 1

    def _release(self, request: Request) -> None:
        self.cache.release(request)
        request.computed = request.scheduled = request.pending = 0
        request.discards_in_flight = False
        if request.is_draining:
            request.is_draining = False
            self._num_draining -= 1
