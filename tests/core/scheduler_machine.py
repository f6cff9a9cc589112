"""The real scheduler and block pool under random events, with a model beside it and invariants after every event.

Driven by Hypothesis (test_scheduler_state_machine.py), by seeded random numbers (scheduler_soak.py), and with bugs
injected (test_injected_bugs.py). Every check is an AssertionError.
"""

from __future__ import annotations

from collections import deque

from kv_memory_model import KVMemory, Truth
from scheduler_checks import PATIENCE, SchedulerChecks, Shape

from octavo.core.cache_groups import CacheGroup, KVCacheSpec
from octavo.core.request import Request, RequestStatus
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig, Step
from octavo.errors import CapacityError

EOS = 0
NUM_TOKENS = 4  # the vocabulary is tiny so that prefixes meet by chance


def sampling(max_tokens: int | None, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)  # type: ignore[arg-type]


class SchedulerMachine(SchedulerChecks):
    """Events are methods; each checks what it can see, and `check` the whole state."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        config = SchedulerConfig(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_model_len=shape.max_model_len,
            block_size=shape.block_size,
            enable_prefix_caching=shape.caching,
            policy=shape.policy,
            max_prefill_tokens_with_decodes=shape.prefill_cap,
            max_steps_in_flight=shape.depth,
        )
        groups = [
            CacheGroup(KVCacheSpec("full" if window is None else "sliding", 1, 8, window), [i])
            for i, window in enumerate(shape.windows)
        ]
        self.scheduler = Scheduler(config, groups, shape.num_blocks)
        self.pool = self.scheduler.cache.pool
        self.memory = KVMemory(list(shape.windows), shape.num_blocks, shape.block_size)
        self.truths: dict[Request, Truth] = {}  # requests that have not ended or are in flight
        self.steps: deque[Step] = deque()
        self.content_of_key: dict[bytes, list[int]] = {}
        self.num_added = self.num_ended = 0
        self.num_queries = self.num_hits = 0  # prompt tokens looked up in the prefix cache, and found
        self.first_in_line: tuple[Request | None, int] = (None, 0)

    # -- events --------------------------------------------------------------------------------------------------

    def add(self, prompt: list[int], params: SamplingParams, priority: int = 0, salt: str | None = None) -> None:
        priority = priority if self.shape.policy == "priority" else 0
        request = Request(f"r{self.num_added}", prompt, params, float(self.num_added), priority, salt, frozenset({EOS}))
        try:
            self.scheduler.add(request)
        except CapacityError:
            fits = self._blocks_alone(request) <= self.shape.num_blocks - 1
            assert len(prompt) + 1 > self.shape.max_model_len or not fits, "a request that fits was refused"
            return
        self.num_added += 1
        self.truths[request] = Truth(request)

    def abort(self, choice: int) -> None:
        self._end_early(choice, "abort")

    def stop(self, choice: int) -> None:
        """As a stop string does, from outside; or one request fails alone."""
        self._end_early(choice // 2, ("stop", "error")[choice % 2])

    def schedule(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            can_wait = bool(self.steps) or not self._unfinished()
            assert can_wait, "work is left, nothing is in flight, and yet nothing is scheduled"
            return False
        self.steps.append(step)
        self._check_step(step)
        self._register_keys(step)
        return True

    def update(self, tokens: list[int], accept: int = 0) -> None:
        """The oldest step in flight comes back; `tokens` are cycled through as what was sampled."""
        if not self.steps:
            return
        step = self.steps.popleft()
        self.memory.execute(step, self.truths, has_failed=False)
        sampled, expected = {}, {}
        for i, item in enumerate(step.requests):
            if item.is_void:
                continue
            truth = self.truths[item.request]
            if item.num_prompt_logprob_rows:
                assert item.prompt_logprob_start == truth.num_rows, "prompt logprobs are repeated or left out"
                truth.num_rows += item.num_prompt_logprob_rows
            if item.sample:
                drafts = item.token_ids[item.num_tokens - item.num_drafts :]
                new = [*drafts[: accept % (len(drafts) + 1)], tokens[i % len(tokens)] % NUM_TOKENS]
                sampled[item.request.request_id] = new
                expected[item.request] = self._expect(truth, new)
        touched = self.scheduler.update(step, sampled)
        self._register_keys(step)
        assert touched == list(expected), "the wrong requests got tokens"
        for request, (reason, stop_reason) in expected.items():
            assert request.finish_reason == reason, f"{request} should have ended with {reason}"
            assert request.stop_reason == stop_reason
        self._forget_ended()
        self._watch_first_in_line()

    def fail(self, choice: int) -> None:
        """Any step in flight fails; its requests end, the others go on."""
        if not self.steps:
            return
        step = self.steps[choice % len(self.steps)]
        self.steps.remove(step)
        live = [item.request for item in step.requests if not item.request.is_finished]
        self.memory.execute(step, self.truths, has_failed=True)
        failed = self.scheduler.fail(step, "injected")
        assert failed == live
        assert all(request.finish_reason == "error" and request.error == "injected" for request in failed)
        self._forget_ended()

    def propose(self, choice: int, drafts: list[int]) -> None:
        ready = [
            r
            for r in self._unfinished()
            if r.status is RequestStatus.RUNNING and not r.in_flight and r.computed == r.known - 1
        ]
        if ready:
            self.scheduler.propose(ready[choice % len(ready)].request_id, [t % NUM_TOKENS for t in drafts])

    def clear_cache(self) -> None:
        self.pool.clear_cache()

    def drain(self, tokens: list[int]) -> int:
        """No more requests: all must end within a bounded number of steps, and every block come back."""
        limit = PATIENCE + len(self._unfinished()) * PATIENCE
        count = 0
        while self.scheduler.has_work():
            if not self.schedule():
                self.update(tokens)
            self.check()
            count += 1
            assert count < limit, "requests do not end"
        assert self.num_ended == self.num_added, "a request was lost"
        assert self.pool.num_free == self.shape.num_blocks - 1, "blocks were lost"
        return count

    # -- the model -----------------------------------------------------------------------------------------------

    def _end_early(self, choice: int, reason: str) -> None:
        unfinished = self._unfinished()
        if not unfinished:
            return
        request = unfinished[choice % len(unfinished)]
        if reason == "abort":
            self.scheduler.abort(request.request_id)
        else:
            self.scheduler.finish(request.request_id, reason, "text", "its own")
        assert request.finish_reason == reason
        assert self.scheduler.abort(request.request_id) is None, "an ended request is still known"
        self._forget_ended()

    def _forget_ended(self) -> None:
        in_flight = {item.request for step in self.steps for item in step.requests}
        for request in [r for r in self.truths if r.is_finished and r not in in_flight]:
            assert not request.tables and not request.in_flight, "an ended request keeps blocks"
            truth = self.truths.pop(request)
            assert request.tokens == truth.tokens, "tokens came late or were lost"
            self.num_ended += 1

    def _expect(self, truth: Truth, new: list[int]) -> tuple[str | None, int | str | None]:
        """Extend the truth by sampled tokens up to the end; returns the finish and stop reasons, by the book."""
        request, params = truth.request, truth.request.params
        limit = self.shape.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, request.num_prompt_tokens + params.max_tokens)
        for token in new:
            truth.extend([token])
            num_output = len(truth.tokens) - request.num_prompt_tokens
            if num_output >= params.min_tokens:
                if token == EOS and not params.ignore_eos:
                    return "stop", None
                if token in (params.stop_token_ids or ()):
                    return "stop", token
            if len(truth.tokens) >= limit:
                return "length", None
        return None, None

    def _blocks_alone(self, request: Request) -> int:
        shape = self.shape
        length = shape.max_model_len
        if request.params.max_tokens is not None:
            length = min(length, request.num_prompt_tokens + request.params.max_tokens)
        total = 0
        for window in shape.windows:
            blocks = -(-(length - 1) // shape.block_size)
            if window is not None:
                span = window - 1 + min(length - 1, shape.depth * shape.max_num_batched_tokens)
                blocks = min(blocks, -(-span // shape.block_size) + 1)
            total += blocks
        return total

    def _register_keys(self, step: Step) -> None:
        """Note what each key must stand for: the numbers of its block's positions."""
        size = self.shape.block_size
        for item in step.requests:
            truth, keys = self.truths[item.request], item.request.block_keys
            for index in range(truth.num_keys, len(keys)):
                content = truth.contents[index * size : (index + 1) * size]
                assert len(content) == size, "a block is hashed before its tokens are known"
                assert self.content_of_key.setdefault(keys[index], content) == content, "one key names two contents"
            truth.num_keys = len(keys)
