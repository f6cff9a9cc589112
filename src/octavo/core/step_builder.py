"""Fills one step: running requests oldest first, then admissions, within the budgets of tokens and blocks."""

from __future__ import annotations

from octavo.core.prefill_cap import PrefillCap
from octavo.core.request import Request, RequestStatus
from octavo.core.request_states import RequestStates
from octavo.core.scheduler_config import SchedulerConfig
from octavo.core.step import IN_FLIGHT_TOKEN, ScheduledRequest, Step


class StepBuilder:
    """Builds `step`. `budget` counts the tokens left, `prefill_left` how many of them prefills and drafts may take."""

    def __init__(self, config: SchedulerConfig, states: RequestStates, step: Step, prefill_cap: PrefillCap) -> None:
        self.config = config
        self.states = states
        self.cache = states.cache
        self.step = step
        self.decodes: list[ScheduledRequest] = []
        self.prefills: list[ScheduledRequest] = []
        self.budget = self.prefill_left = config.max_num_batched_tokens
        self.lacks_blocks = False
        self.first_admissions: list[Request] = []  # those that looked the prefix cache up
        self._prefill_cap = prefill_cap

    def build(self) -> Step | None:
        """The step, or None if nothing can be scheduled now."""
        self._schedule_running()
        if not self.lacks_blocks:
            self._schedule_waiting()
        step = self.step
        step.num_decodes = len(self.decodes)
        step.requests = self.decodes + self.prefills
        step.num_tokens = self.config.max_num_batched_tokens - self.budget
        return step if step.requests else None

    def _schedule_running(self) -> None:
        running = self.states.running()
        # inputs at hand; the last token of a request is never an input, hence max_length - 1
        ready = [min(len(r.tokens) + r.pending, r.max_length - 1) - r.computed - r.scheduled for r in running]
        decodes = ready.count(1)
        self.prefill_left -= decodes  # a decode's token is set aside even if an older prefill comes first
        self.prefill_left = min(self.prefill_left, self.config.max_prefill_tokens or self.prefill_left)
        self.step.kv_tokens = (self.cache.pool.num_usable - self.cache.pool.num_free) * self.config.block_size
        if decodes:
            backlog = sum(count for count in ready if count > 1) + self.states.waiting.num_prompt_tokens
            cap = self._prefill_cap.tokens(decodes, self.step.kv_tokens, backlog)
            self.prefill_left = min(self.prefill_left, cap or self.prefill_left)
        index = 0
        while index < len(running):  # preemption takes requests off the end
            request, count = running[index], ready[index]
            index += 1
            if count == 1 and not request.drafts:
                if request.computed + request.scheduled < request.room or self._has_room(request, 1):
                    self.decodes.append(self._schedule(request, 1))
            elif count == 1:
                self._schedule_drafts(request)
            elif count > 1 and self.prefill_left > 0:
                count = min(count, self.prefill_left)
                if self._has_room(request, count):
                    self.prefill_left -= count
                    (self.decodes if count == 1 else self.prefills).append(self._schedule(request, count))

    def _schedule_drafts(self, request: Request) -> None:
        """A decode with guesses; they are dropped rather than that anyone is preempted for them."""
        num_drafts = min(len(request.drafts), self.prefill_left)
        if num_drafts and self.cache.grow(request, request.computed + 1 + num_drafts):
            self.prefill_left -= num_drafts
            self.prefills.append(self._schedule(request, 1 + num_drafts, num_drafts))
        elif self._has_room(request, 1):
            self.decodes.append(self._schedule(request, 1))
        request.drafts = []

    def _has_room(self, request: Request, count: int) -> bool:
        """Whether the tables cover `count` more tokens, by preempting if need be; False if the request has to wait.

        Blocks that wait for steps in flight come back soon, so while there are such nothing (more) is preempted.
        """
        end = request.computed + request.scheduled + count
        if end <= request.room or self.cache.grow(request, end):
            return True
        self.lacks_blocks = True
        while not self.states.num_draining:
            if self.states.preempt_last() is request:
                return False
            if self.cache.grow(request, end):
                return True
        return False

    def _schedule_waiting(self) -> None:
        """Admit requests in order, as long as there is room for the head's whole prompt."""
        waiting, states = self.states.waiting, self.states
        while self.prefill_left > 0 and len(states.running()) < self.config.max_num_seqs:
            request = waiting.peek()
            if request is None or request.in_flight or request.admission_need > self.cache.pool.num_free:
                break
            hit = self.cache.find_hit(request)
            start = hit.num_blocks * self.config.block_size
            count = min(request.known - start, self.prefill_left)
            if not self.cache.admit(request, hit, start + count):
                break
            self._note_hit(request, start)
            states.admit(request)
            self.prefill_left -= count
            (self.decodes if count == 1 else self.prefills).append(self._schedule(request, count))

    def _note_hit(self, request: Request, num_tokens: int) -> None:
        request.num_hit_tokens = request.computed = num_tokens
        request.admitted_step = self.step.id
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_tokens
            if self.cache.may_hit(request):
                self.first_admissions.append(request)

    def _schedule(self, request: Request, count: int, num_drafts: int = 0) -> ScheduledRequest:
        """Count the tokens as in flight and publish the blocks that they fill."""
        tokens = request.tokens
        known = len(tokens)
        start = request.computed + request.scheduled
        end = start + count
        if count == 1:
            inputs = [tokens[start] if start < known else IN_FLIGHT_TOKEN]
        else:
            inputs = tokens[start:end] + request.drafts[:num_drafts]
        sample = end - num_drafts == known + request.pending
        scheduled = ScheduledRequest(request, start, count, inputs, request.tables, sample, num_drafts)
        if end >= request.publish_at:
            # K and V are written before attention in every layer, so even this step's later requests may read them
            for block in self.cache.publish(request, min(end, known)):
                self.step.published.append((request, block))
        request.scheduled += count
        request.in_flight += 1
        self.budget -= count
        if sample:
            request.pending += 1
        if request.params.prompt_logprobs is not None:
            first = max(start, request.num_prompt_logprobs)
            scheduled.prompt_logprob_start = first
            scheduled.num_prompt_logprob_rows = max(0, min(end, request.num_prompt_tokens - 1) - first)
        return scheduled
