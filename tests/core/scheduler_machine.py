"""The real scheduler and block pool under random events, with a model beside it and invariants after every event.

Driven by Hypothesis (test_scheduler_state_machine.py), by seeded random numbers (scheduler_soak.py), and with bugs
injected (test_injected_bugs.py). Every check is an AssertionError.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from kv_memory_model import KVMemory, Truth

from octavo.core.block_pool import NULL_BLOCK
from octavo.core.cache_groups import CacheGroup, KVCacheSpec
from octavo.core.request import Request, RequestStatus
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import ScheduledRequest, Scheduler, SchedulerConfig, Step
from octavo.errors import CapacityError

EOS = 0
NUM_TOKENS = 4  # the vocabulary is tiny so that prefixes meet by chance
PATIENCE = 300  # steps that the first request in line may take


@dataclass(frozen=True)
class Shape:
    """One configuration to try: `windows` has an entry a cache group, None for full attention."""

    windows: tuple[int | None, ...] = (None,)
    num_blocks: int = 24
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 32
    prefill_cap: int = 0
    policy: str = "fcfs"
    caching: bool = True
    depth: int = 1


def sampling(max_tokens: int | None, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)  # type: ignore[arg-type]


class SchedulerMachine:
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

    def _unfinished(self) -> list[Request]:
        return [request for request in self.truths if not request.is_finished]

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

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_step(self, step: Step) -> None:
        items, shape = step.requests, self.shape
        assert step.num_tokens == sum(item.num_tokens for item in items) <= shape.max_num_batched_tokens
        assert 1 <= len(items) == len({item.request for item in items}) <= shape.max_num_seqs
        num_decodes = step.num_decodes
        assert [item.num_tokens == 1 for item in items] == [True] * num_decodes + [False] * (len(items) - num_decodes)
        published = {block.id for _, block in step.published}
        for item in items:
            self._check_item(item, step, published)
        self._check_prefill_cap(step)
        stats = self.scheduler.stats()
        assert stats.running <= shape.max_num_seqs
        assert stats.running + stats.waiting == len(self._unfinished())
        assert (stats.prefix_queries, stats.prefix_hits) == (self.num_queries, self.num_hits)
        assert stats.steps_in_flight == len(self.steps)

    def _check_item(self, item: ScheduledRequest, step: Step, published: set[int]) -> None:
        request, size = item.request, self.shape.block_size
        assert not request.is_finished, "an ended request is scheduled"
        truth, end = self.truths[request], item.start + item.num_tokens - item.num_drafts
        earlier = [other for s in self.steps if s is not step for other in s.requests if other.request is request]
        expected_start = earlier[-1].start + earlier[-1].num_tokens if earlier else item.start
        assert item.start == expected_start, "positions are left out or repeated"
        in_flight = sum(other.sample for other in earlier)
        assert item.sample == (end == len(truth.tokens) + in_flight), "a sample at the wrong position"
        assert item.num_tokens >= 1 and item.start < len(truth.tokens) + in_flight
        if request.admitted_step == step.id:
            assert item.start <= len(truth.tokens) - 1, "the last token was matched"
            assert request.params.prompt_logprobs is None or item.start == 0, "prompt logprobs are skipped by a hit"
            assert self.shape.caching or item.start == 0
            if not request.num_preemptions and self.shape.caching and request.params.prompt_logprobs is None:
                assert request.num_cached_tokens == item.start
                self.num_queries += request.num_prompt_tokens
                self.num_hits += item.start
        for table in item.block_ids:
            for index in range(item.start // size, (item.start + item.num_tokens - 1) // size + 1):
                block = self.pool.blocks[table[index]]
                assert block.key is None or block.id in published, "a cached block is written again"
                owned = block.ref_count == 1 or block.id in published
                assert owned and block.id != NULL_BLOCK, "a block is written that others hold"

    def _check_prefill_cap(self, step: Step) -> None:
        streams = [i for i in step.requests if i.num_tokens - i.num_drafts == 1 and i.request.admitted_step != step.id]
        has_streams = any(item.sample for item in streams)
        if self.shape.prefill_cap and has_streams:
            total = sum(item.num_tokens for item in step.requests if item not in streams)
            total += sum(item.num_drafts for item in streams)
            assert total <= self.shape.prefill_cap, "prefills stall the streams"

    def _watch_first_in_line(self) -> None:
        """The first request in line must end within PATIENCE steps."""
        first = min(self._unfinished(), key=lambda r: r.sort_key, default=None)
        watched, since = self.first_in_line
        self.first_in_line = (first, since + 1 if first is watched else 0)
        assert self.first_in_line[1] < PATIENCE or first is None, f"{first} starves"

    def check(self) -> None:
        """Everything that must hold between any two events."""
        self._check_places()
        self._check_references()
        self._check_free_list()
        self._check_keys()

    def _check_places(self) -> None:
        states = self.scheduler.states
        queued = [r for _, r in states.waiting._heap if not r.is_finished]
        running = [r for r in states._running if not r.is_finished]
        assert len(queued) == len(states.waiting)
        unfinished = self._unfinished()
        assert len(queued) + len(running) == len(unfinished), "a request is lost or in two places"
        assert set(queued).union(running) == set(unfinished)
        assert set(states.requests.values()) == set(unfinished)
        assert running == sorted(running, key=lambda r: r.sort_key)
        in_flight: Counter[Request] = Counter()
        scheduled: Counter[Request] = Counter()
        pending: Counter[Request] = Counter()
        for step in self.steps:
            for item in step.requests:
                in_flight[item.request] += 1
                scheduled[item.request] += item.num_tokens
                pending[item.request] += item.sample
        num_draining = 0
        for request, truth in self.truths.items():
            assert request.in_flight == in_flight[request]
            num_draining += request.status is not RequestStatus.RUNNING and request.in_flight > 0
            if not request.is_finished and not request.discards_in_flight:
                assert request.scheduled == scheduled[request] and request.pending == pending[request]
                assert request.computed + request.scheduled <= request.room
                assert request.computed < request.known, "nothing is left to compute"
            assert request.tokens == truth.tokens
            assert request.tables or request.status is not RequestStatus.RUNNING
        assert num_draining == states.num_draining

    def _check_references(self) -> None:
        references: Counter[int] = Counter()
        for request in self.truths:
            for table in request.tables:
                references.update(table)
        references[NULL_BLOCK] = 1
        for block in self.pool.blocks:
            assert block.ref_count == references[block.id], f"block {block.id} has a wrong reference count"
        for step in self.steps:  # what a step in flight writes belongs to that request and to nobody else
            for item in step.requests:
                assert item.request.tables == item.block_ids, (
                    "blocks were taken away while a step in flight writes them"
                )

    def _check_free_list(self) -> None:
        free, block = [], self.pool._head.next
        while block is not self.pool._head:
            assert block.next.prev is block and block.prev.next is block
            free.append(block.id)
            block = block.next
            assert len(free) <= self.shape.num_blocks, "the free list is a knot"
        assert len(free) == self.pool.num_free
        assert set(free) == {b.id for b in self.pool.blocks if b.ref_count == 0}

    def _check_keys(self) -> None:
        unwritten = {block for step in self.steps for _, block in step.published}
        num_keyed = sum(block.key is not None for block in self.pool.blocks)
        assert num_keyed == sum(map(len, self.pool.cached)), "keys and blocks disagree"
        for group, cached in enumerate(self.pool.cached):
            for key, block in cached.items():
                assert block.key == key and block.group == group, "a stale key leads to a reused block"
                if block not in unwritten:
                    found = self.memory.slots[group][block.id]
                    assert found == self.content_of_key[key], f"block {block.id} does not hold what its key says"
