"""Bugs injected on purpose: each must make the scheduler machine fail within 10,000 random steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from scheduler_soak import SoakFailure, soak

from octavo.core import kv_cache_manager
from octavo.core.block_pool import NULL_BLOCK, Block, BlockPool, root_key
from octavo.core.cache_groups import SlidingWindow
from octavo.core.kv_cache_manager import KVCacheManager, PrefixHit
from octavo.core.prefill_cap import FixedCap
from octavo.core.request import Request, RequestStatus
from octavo.core.request_states import RequestStates
from octavo.core.scheduler import Scheduler
from octavo.core.step import ScheduledRequest, Step
from octavo.core.step_builder import StepBuilder
from octavo.core.waiting_queue import WaitingQueue

MAX_STEPS = 10_000
Patch = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(inject: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS[inject.__name__] = inject
    return inject


@bug
def double_free(patch: Patch) -> None:
    release = KVCacheManager.release

    def release_twice(self: KVCacheManager, request: Request) -> None:
        tables = request.tables
        release(self, request)
        for table in tables[:1]:
            for block_id in table[-1:]:
                self.pool._push(self.pool.blocks[block_id], at_front=True)

    patch.setattr(KVCacheManager, "release", release_twice)


@bug
def block_leaked(patch: Patch) -> None:
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, ids: release(self, list(ids)[1:]))


@bug
def key_kept_after_failed_step(patch: Patch) -> None:
    patch.setattr(Scheduler, "_withdraw_keys", lambda self, steps, writers: None)


@bug
def key_of_later_steps_kept_after_failed_step(patch: Patch) -> None:
    withdraw = Scheduler._withdraw_keys
    patch.setattr(Scheduler, "_withdraw_keys", lambda self, steps, writers: withdraw(self, list(steps)[:1], writers))


@bug
def hit_on_a_failed_step_kept(patch: Patch) -> None:
    patch.setattr("octavo.core.scheduler._admitted_on_hits_after", lambda step, later: [])


@bug
def lost_abort(patch: Patch) -> None:
    finish = RequestStates.finish

    def only_if_idle(self: RequestStates, request: Request, reason: str) -> None:
        if reason != "abort" or not request.in_flight:
            finish(self, request, reason)

    patch.setattr(RequestStates, "finish", only_if_idle)


@bug
def late_tokens_kept(patch: Patch) -> None:
    update = Scheduler.update

    def append_anyway(self: Scheduler, step: Step, sampled: dict[str, list[int]]) -> list[Request]:
        for item in step.requests:
            if item.request.is_finished and item.sample:
                item.request.tokens.append(1)
        return update(self, step, sampled)

    patch.setattr(Scheduler, "update", append_anyway)


@bug
def last_token_matched(patch: Patch) -> None:
    find_hit = KVCacheManager.find_hit

    def one_token_more(self: KVCacheManager, request: Request) -> PrefixHit:
        request.tokens.append(0)
        try:
            return find_hit(self, request)
        finally:
            request.tokens.pop()

    patch.setattr(KVCacheManager, "find_hit", one_token_more)


@bug
def hit_not_charged(patch: Patch) -> None:
    find_hit = KVCacheManager.find_hit

    def free_of_charge(self: KVCacheManager, request: Request) -> PrefixHit:
        hit = find_hit(self, request)
        return PrefixHit(hit.num_blocks, hit.tables, 0)

    patch.setattr(KVCacheManager, "find_hit", free_of_charge)


@bug
def reference_not_counted_on_share(patch: Patch) -> None:
    def share(self: BlockPool, block_id: int) -> None:
        block = self.blocks[block_id]
        if block.ref_count == 0:
            self._unlink(block)
            block.ref_count = 1

    patch.setattr(BlockPool, "share", share)


@bug
def shared_block_left_in_free_list(patch: Patch) -> None:
    def share(self: BlockPool, block_id: int) -> None:
        self.blocks[block_id].ref_count += 1

    patch.setattr(BlockPool, "share", share)


@bug
def stale_key_after_eviction(patch: Patch) -> None:
    allocate = BlockPool.allocate

    def keep_keys(self: BlockPool, count: int) -> list[int]:
        withdraw = self.withdraw
        self.withdraw = lambda block: setattr(block, "key", None)  # type: ignore[method-assign]
        try:
            return allocate(self, count)
        finally:
            self.withdraw = withdraw  # type: ignore[method-assign]

    patch.setattr(BlockPool, "allocate", keep_keys)


@bug
def window_freed_too_early(patch: Patch) -> None:
    first_needed = SlidingWindow.first_needed
    patch.setattr(SlidingWindow, "first_needed", lambda self, spec, position: first_needed(self, spec, position + 1))


@bug
def window_freed_by_scheduled_tokens(patch: Patch) -> None:
    """Blocks go while a step in flight still reads them: right only if nothing else takes them."""
    free = KVCacheManager._free_left_of_window

    def ahead(self: KVCacheManager, request: Request, group: int) -> None:
        computed = request.computed
        request.computed += request.scheduled
        free(self, request, group)
        request.computed = computed

    patch.setattr(KVCacheManager, "_free_left_of_window", ahead)


@bug
def hit_of_one_group_taken_for_all(patch: Patch) -> None:
    patch.setattr(SlidingWindow, "longest_hit", lambda self, spec, is_cached, limit, block_size: limit)


@bug
def preempted_request_not_requeued(patch: Patch) -> None:
    def requeue(self: RequestStates, request: Request) -> None:
        request.status = RequestStatus.PREEMPTED
        self._drain(request)

    patch.setattr(RequestStates, "_requeue", requeue)


@bug
def slot_reused_while_in_flight(patch: Patch) -> None:
    patch.setattr(RequestStates, "_drain", lambda self, request: self.release(request))


@bug
def preempted_request_admitted_while_in_flight(patch: Patch) -> None:
    peek = WaitingQueue.peek

    def forget(self: WaitingQueue) -> Request | None:
        request = peek(self)
        if request is not None:
            request.in_flight = 0
        return request

    patch.setattr(WaitingQueue, "peek", forget)


@bug
def finished_request_scheduled_again(patch: Patch) -> None:
    patch.setattr(RequestStates, "running", lambda self: self._running)


@bug
def salt_ignored(patch: Patch) -> None:
    patch.setattr(kv_cache_manager, "root_key", lambda salt: root_key(None))


@bug
def parent_left_out_of_key(patch: Patch) -> None:
    chained_key = kv_cache_manager.chained_key
    patch.setattr(kv_cache_manager, "chained_key", lambda parent, tokens: chained_key(b"", tokens))


@bug
def key_published_for_a_partial_block(patch: Patch) -> None:
    publish = KVCacheManager.publish

    def early(self: KVCacheManager, request: Request, num_tokens: int) -> list[Block]:
        return publish(self, request, min(request.known, num_tokens + 1))

    patch.setattr(KVCacheManager, "publish", early)


@bug
def drafts_not_rolled_back(patch: Patch) -> None:
    accept = Scheduler._accept

    def keep(self: Scheduler, item: ScheduledRequest, tokens: list[int]) -> str | None:
        computed = item.request.computed
        reason = accept(self, item, tokens)
        item.request.computed = computed
        return reason

    patch.setattr(Scheduler, "_accept", keep)


@bug
def prompt_logprob_rows_skipped_by_a_hit(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "may_hit", lambda self, request: self.enable_caching)


@bug
def budget_exceeded(patch: Patch) -> None:
    init = StepBuilder.__init__

    def generous(self: StepBuilder, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        self.prefill_left += 1

    patch.setattr(StepBuilder, "__init__", generous)


@bug
def prefill_cap_ignored(patch: Patch) -> None:
    init = StepBuilder.__init__
    no_cap = FixedCap(0)
    patch.setattr(
        StepBuilder, "__init__", lambda self, config, states, step, cap: init(self, config, states, step, no_cap)
    )


@bug
def last_admitted_never_served(patch: Patch) -> None:
    """A request starves: with a full house, the last running one is passed over."""
    schedule = StepBuilder._has_room

    def pass_over(self: StepBuilder, request: Request, count: int) -> bool:
        return len(self.states.running()) < 3 and schedule(self, request, count)

    patch.setattr(StepBuilder, "_has_room", pass_over)


@bug
def victim_is_the_oldest(patch: Patch) -> None:
    preempt_last = RequestStates.preempt_last

    def preempt_first(self: RequestStates) -> Request:
        self._running.append(self._running.pop(0))
        return preempt_last(self)

    patch.setattr(RequestStates, "preempt_last", preempt_first)


@bug
def min_tokens_ignored(patch: Patch) -> None:
    append = Request.append

    def at_once(self: Request, token: int) -> str | None:
        self.min_length = 0
        return append(self, token)

    patch.setattr(Request, "append", at_once)


@bug
def null_block_freed(patch: Patch) -> None:
    release = BlockPool.release

    def all_of_them(self: BlockPool, block_ids: Iterable[int]) -> None:
        ids = list(block_ids)
        if NULL_BLOCK in ids:
            self._push(self.blocks[NULL_BLOCK], at_front=False)
        release(self, ids)

    patch.setattr(BlockPool, "release", all_of_them)


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises(SoakFailure) as failure:
        soak(MAX_STEPS)
    assert failure.value.steps <= MAX_STEPS


def test_no_bug_is_found_without_one() -> None:
    assert soak(MAX_STEPS) >= MAX_STEPS
