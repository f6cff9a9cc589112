"""What must hold of a scheduler between any two events, and of every step that it picks."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from kv_memory_model import KVMemory, Truth

from octavo.core.block_pool import NULL_BLOCK, BlockPool
from octavo.core.request import Request, RequestStatus
from octavo.core.scheduler import ScheduledRequest, Scheduler, Step

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


class SchedulerChecks:
    """The checks, over state that the machine keeps."""

    shape: Shape
    scheduler: Scheduler
    pool: BlockPool
    memory: KVMemory
    truths: dict[Request, Truth]  # requests that have not ended or are in flight
    steps: deque[Step]
    content_of_key: dict[bytes, list[int]]
    num_queries: int  # prompt tokens looked up in the prefix cache
    num_hits: int  # and found
    first_in_line: tuple[Request | None, int]

    def _unfinished(self) -> list[Request]:
        return [request for request in self.truths if not request.is_finished]

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
        assert states.waiting.num_prompt_tokens == sum(request.num_prompt_tokens for request in queued)
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
