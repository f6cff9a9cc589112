"""What the scheduler does in cases worked out by hand; the state machine covers the rest."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.cache_groups import CacheGroup, KVCacheSpec
from octavo.core.request import Request, RequestStatus
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig, Step
from octavo.errors import CapacityError, UserError


def scheduler(num_blocks: int = 33, windows: tuple[int | None, ...] = (None,), **config: Any) -> Scheduler:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 4} | config
    groups = [
        CacheGroup(KVCacheSpec("full" if window is None else "sliding", 1, 8, window), [i])
        for i, window in enumerate(windows)
    ]
    return Scheduler(SchedulerConfig(**values), groups, num_blocks)


def request(name: str, prompt: int | list[int], max_tokens: int | None = 20, **more: Any) -> Request:
    """A prompt given as a length has tokens that no other such prompt has."""
    tokens = prompt if isinstance(prompt, list) else [1000 * ord(name[0]) + i for i in range(prompt)]
    fields = {k: more.pop(k) for k in ("priority", "cache_salt", "eos_token_ids", "arrival_time") if k in more}
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens, **more), **fields)


def shape(step: Step | None) -> list[tuple[str, int, int]]:
    assert step is not None
    return [(item.request.request_id, item.start, item.num_tokens) for item in step.requests]


def run(target: Scheduler, token: int = 7) -> Step | None:
    step = target.schedule()
    if step is not None:
        target.update(step, {item.request.request_id: [token] for item in step.requests if item.sample})
    return step


# -- steps -------------------------------------------------------------------------------------------------------


def test_prefill_in_chunks_then_decode() -> None:
    target = scheduler()
    a = request("a", 20)
    target.add(a)
    first, second, third = run(target), run(target), run(target)
    assert shape(first) == [("a", 0, 16)]
    assert shape(second) == [("a", 16, 4)]
    assert shape(third) == [("a", 20, 1)]
    assert first is not None and not first.requests[0].sample
    assert second is not None and second.requests[0].sample
    assert third is not None and third.requests[0].token_ids == [7]
    assert (third.num_tokens, third.num_decodes) == (1, 1)
    assert third.requests[0].block_ids == [[1, 2, 3, 4, 5, 6]]
    assert (a.computed, a.known, a.scheduled) == (21, 22, 0)


def test_decodes_come_first_and_prefills_take_the_rest() -> None:
    target = scheduler()
    target.add(request("a", 4))
    run(target)
    target.add(request("b", 30))
    assert shape(run(target)) == [("a", 4, 1), ("b", 0, 15)]


def test_a_long_prompt_does_not_stall_the_streams() -> None:
    target = scheduler(max_prefill_tokens_with_decodes=6)
    target.add(request("a", 4, max_tokens=3))
    target.add(request("b", 30))
    assert shape(run(target)) == [("a", 0, 4), ("b", 0, 12)]  # nobody decodes yet
    assert shape(run(target)) == [("a", 4, 1), ("b", 12, 6)]
    assert shape(run(target)) == [("a", 5, 1), ("b", 18, 6)]
    assert shape(run(target)) == [("b", 24, 6)]


def test_a_prefill_in_front_leaves_the_decodes_their_tokens() -> None:
    target = scheduler(max_num_batched_tokens=8, policy="priority")
    target.add(request("b", 2))
    run(target)
    target.add(request("a", 40, priority=-1))
    assert shape(run(target)) == [("b", 2, 1), ("a", 0, 7)]
    assert [r.request_id for r in target.states.running()] == ["a", "b"]
    assert shape(run(target)) == [("b", 3, 1), ("a", 7, 7)]


def test_requests_run_up_to_the_limit() -> None:
    target = scheduler(max_num_seqs=2)
    for name in "abc":
        target.add(request(name, 2))
    assert shape(run(target)) == [("a", 0, 2), ("b", 0, 2)]
    assert (target.stats().running, target.stats().waiting) == (2, 1)
    target.abort("a")
    assert shape(run(target)) == [("b", 2, 1), ("c", 0, 2)]


def test_a_step_in_flight_leaves_a_placeholder() -> None:
    target = scheduler(max_steps_in_flight=2)
    a = request("a", 4, max_tokens=3)
    target.add(a)
    first, second = target.schedule(), target.schedule()
    assert first is not None and second is not None
    assert target.schedule() is None
    assert second.requests[0].token_ids == [-1]
    assert (a.computed, a.scheduled, a.pending) == (0, 5, 2)
    target.update(first, {"a": [8]})
    third = target.schedule()
    assert third is not None and shape(third) == [("a", 5, 1)]
    target.update(second, {"a": [9]})
    assert target.schedule() is None, "three tokens are on their way, and no more are wanted"
    assert target.update(third, {"a": [10]}) == [a]
    assert (a.output_token_ids, a.finish_reason) == ([8, 9, 10], "length")
    assert not target.has_work()


def test_update_takes_steps_in_order() -> None:
    target = scheduler(max_steps_in_flight=2)
    target.add(request("a", 4))
    target.schedule()
    second = target.schedule()
    assert second is not None
    with pytest.raises(ValueError, match="not the oldest"):
        target.update(second, {"a": [1]})


# -- the prefix cache --------------------------------------------------------------------------------------------


def test_requests_of_one_step_share_a_prefix() -> None:
    target = scheduler()
    prefix = list(range(8))
    a, b = request("a", [*prefix, 50]), request("b", [*prefix, 60, 61])
    target.add(a)
    target.add(b)
    assert shape(run(target)) == [("a", 0, 9), ("b", 8, 2)]
    assert b.tables[0][:2] == a.tables[0][:2]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)
    stats = target.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (19, 8)


def test_the_last_token_is_never_matched() -> None:
    target = scheduler()
    prompt = list(range(8))
    target.add(request("a", prompt))
    run(target)
    target.add(request("b", prompt))
    assert shape(run(target)) == [("a", 8, 1), ("b", 4, 4)]


def test_what_ended_is_still_found() -> None:
    target = scheduler()
    target.add(request("a", list(range(9)), max_tokens=4))
    for _ in range(4):
        run(target)
    assert target.stats().blocks_free == 32
    target.add(request("b", [*range(9), 7, 7, 7, 1]))  # the prompt and the output, 12 of whose tokens have their KV
    assert shape(run(target)) == [("b", 12, 1)]


def test_salts_and_switched_off_caching_share_nothing() -> None:
    for config, salts in (({}, ("x", "y")), ({}, (None, "")), ({"enable_prefix_caching": False}, (None, None))):
        target = scheduler(**config)
        for name, salt in zip("ab", salts, strict=True):
            target.add(request(name, list(range(8)), cache_salt=salt))
        assert shape(run(target)) == [("a", 0, 8), ("b", 0, 8)]
        assert target.stats().prefix_hits == 0


def test_hits_on_free_blocks_are_charged() -> None:
    target = scheduler(num_blocks=5)
    target.add(request("a", list(range(9)), max_tokens=1))
    run(target)  # leaves 2 cached blocks among 4 free ones
    target.add(request("b", 4, max_tokens=5))
    run(target)  # takes 1 of them, 3 are left
    target.add(request("c", [*range(8), 9, 9, 9, 9, 9], max_tokens=2))  # 2 hits and 2 new blocks
    assert shape(run(target)) == [("b", 4, 1)]
    assert target.stats().waiting == 1


def test_prompt_logprobs_skip_the_cache_but_feed_it() -> None:
    target = scheduler()
    prompt = list(range(20))
    target.add(request("a", prompt, prompt_logprobs=0))
    first = target.schedule()
    assert first is not None
    item = first.requests[0]
    assert (item.prompt_logprob_start, item.num_prompt_logprob_rows) == (0, 16)
    target.update(first, {})
    target.add(request("b", prompt, prompt_logprobs=0))
    second = target.schedule()
    assert second is not None
    assert shape(second) == [("a", 16, 4), ("b", 0, 12)]
    item = second.requests[0]
    assert (item.prompt_logprob_start, item.num_prompt_logprob_rows) == (16, 3)  # 19 rows score 20 tokens
    target.update(second, {"a": [1]})
    target.add(request("c", prompt))
    assert ("c", 16, 4) in shape(run(target))
    assert target.stats().prefix_queries == 20


def test_a_hit_is_what_all_groups_agree_on() -> None:
    target = scheduler(num_blocks=60, windows=(None, 6))
    prompt = list(range(22))
    a = request("a", prompt, max_tokens=2)
    target.add(a)
    run(target)
    run(target)
    target.add(request("b", [*prompt[:18], 99], max_tokens=1))
    b = target.states.requests["b"]
    assert ("b", 16, 3) in shape(run(target))
    assert b.finish_reason == "length"
    target.cache.pool.withdraw(target.cache.pool.cached[1][a.block_keys[3]])  # the window's last block is lost
    target.add(request("c", [*prompt[:18], 98], max_tokens=1))
    assert ("c", 12, 7) in shape(run(target))


def test_blocks_left_of_the_window_are_freed() -> None:
    target = scheduler(windows=(4,), max_num_batched_tokens=8)
    a = request("a", 8, max_tokens=30)
    target.add(a)
    for _ in range(20):
        run(target)
    assert a.tables[0][:5] == [0, 0, 0, 0, 0]
    assert target.stats().blocks_total - target.stats().blocks_free <= 3


# -- running out of blocks ---------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_comes_back_with_its_blocks() -> None:
    target = scheduler(num_blocks=7)
    a, b, c = request("a", 8, max_tokens=8), request("b", 8, max_tokens=8), request("c", 2, max_tokens=1)
    for r in (a, b):
        target.add(r)
    for _ in range(5):
        run(target)
    assert (a.known, b.known) == (13, 13)
    target.add(c)
    assert shape(run(target)) == [("a", 12, 1)]
    assert (b.status, b.num_preemptions, b.computed) == (RequestStatus.PREEMPTED, 1, 0)
    assert target.states.waiting.peek() is b, "it waits in front of those that came after it"
    while b.status is RequestStatus.PREEMPTED:
        run(target)
    assert b.num_hit_tokens >= 8, "its blocks were still cached"
    while target.has_work():
        run(target)
    assert (len(a.output_token_ids), len(b.output_token_ids), c.finish_reason) == (8, 8, "length")
    assert target.stats().preemptions == 1
    assert target.stats().blocks_free == 6


def test_admission_needs_room_for_the_prompt_only() -> None:
    target = scheduler(num_blocks=7)
    target.add(request("a", 8, max_tokens=12))
    target.add(request("b", 8, max_tokens=12))  # both at most: 10 blocks of 6
    assert shape(run(target)) == [("a", 0, 8), ("b", 0, 8)]
    target.add(request("c", 12, max_tokens=1))
    assert shape(run(target)) == [("a", 8, 1), ("b", 8, 1)]


def test_priorities_decide_who_runs_and_who_goes() -> None:
    target = scheduler(num_blocks=7, policy="priority", max_num_seqs=2)
    for name, priority in (("a", 5), ("b", 0), ("c", 1)):
        target.add(request(name, 8, max_tokens=8, priority=priority))
    assert shape(run(target)) == [("b", 0, 8), ("c", 0, 8)]
    while not target.stats().preemptions:
        run(target)
    assert target.states.requests["c"].num_preemptions == 1


def test_a_preempted_request_in_flight_keeps_its_blocks_and_its_tokens() -> None:
    target = scheduler(num_blocks=5, max_steps_in_flight=2, max_num_batched_tokens=8)
    a, b = request("a", 7, max_tokens=6), request("b", 7, max_tokens=6)
    target.add(a)
    run(target)
    target.add(b)
    first = target.schedule()
    assert shape(first) == [("a", 7, 1), ("b", 0, 7)]
    second = target.schedule()  # `a` needs a block, so `b` has to go, but `first` still writes its blocks
    assert second is None
    assert b.status is RequestStatus.PREEMPTED
    assert len(b.tables[0]) == 2
    assert first is not None
    assert target.update(first, {"a": [1], "b": [2]}) == [a, b]
    assert (b.tables, b.output_token_ids, b.computed) == ([], [2], 0)
    assert shape(run(target))[0] == ("a", 8, 1)


# -- ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason", "kept"),
    [
        ({}, [5, 2, 6], "stop", None, 2),
        ({"ignore_eos": True}, [5, 2, 6, 2], "length", None, 4),
        ({"min_tokens": 3}, [2, 2, 2, 2], "stop", None, 3),
        ({"stop_token_ids": [9]}, [5, 9, 6], "stop", 9, 2),
        ({"stop_token_ids": [9], "ignore_eos": True}, [2, 9, 6], "stop", 9, 2),
        ({"stop_token_ids": [9], "min_tokens": 3}, [9, 9, 6, 9], "stop", 9, 4),
    ],
)
def test_how_a_request_ends(
    params: dict[str, Any], tokens: list[int], reason: str, stop_reason: Any, kept: int
) -> None:
    target = scheduler()
    a = request("a", 3, max_tokens=4, eos_token_ids=frozenset({2}), **params)
    target.add(a)
    for token in tokens:
        if target.has_work():
            run(target, token)
    assert (a.finish_reason, a.stop_reason, a.num_output_tokens) == (reason, stop_reason, kept)
    assert a.is_finished
    assert target.stats().blocks_free == target.stats().blocks_total


def test_the_context_ends_a_request_and_none_means_up_to_there() -> None:
    target = scheduler(max_model_len=10)
    a, b = request("a", 7, max_tokens=None), request("b", 7, max_tokens=500)
    target.add(a)
    target.add(b)
    while target.has_work():
        run(target)
    assert a.known == b.known == 10
    assert a.finish_reason == b.finish_reason == "length"


def test_a_stop_string_ends_a_request_from_outside() -> None:
    target = scheduler()
    a = request("a", 3)
    target.add(a)
    run(target)
    assert target.finish("a", "stop", stop_reason="END") is a
    assert (a.finish_reason, a.stop_reason) == ("stop", "END")
    assert target.finish("a", "stop") is None
    assert not target.has_work()


def test_an_abort_in_flight_drops_the_token_and_frees_once() -> None:
    target = scheduler()
    a = request("a", 6)
    target.add(a)
    step = target.schedule()
    assert step is not None
    target.abort("a")
    target.abort("a")
    target.abort("nobody")
    assert a.finish_reason == "abort"
    assert target.stats().blocks_free == target.stats().blocks_total - 2, "a step still writes them"
    assert target.has_work()
    target.add(request("a", 3))  # the id is free again
    assert step.requests[0].is_void
    assert target.update(step, {}) == []
    assert a.output_token_ids == []
    assert target.stats().blocks_free == target.stats().blocks_total
    assert shape(run(target)) == [("a", 0, 3)]


def test_aborts_of_many_waiting_requests_leave_nothing_behind() -> None:
    target = scheduler()
    for i in range(50):
        target.add(request(f"{i}", 3))
    for i in range(0, 50, 2):
        target.abort(f"{i}")
    assert target.stats().waiting == 25
    assert shape(run(target))[0][0] == "1"


def test_a_failed_step_ends_its_requests_and_withdraws_its_keys() -> None:
    target = scheduler()
    a = request("a", list(range(9)))
    target.add(a)
    step = target.schedule()
    assert step is not None
    assert target.fail(step, "out of memory") == [a]
    assert (a.finish_reason, a.error) == ("error", "out of memory")
    target.add(request("b", list(range(9))))
    assert shape(run(target)) == [("b", 0, 9)]


def test_who_was_admitted_on_blocks_of_a_failed_step_is_computed_again() -> None:
    target = scheduler(max_steps_in_flight=2)
    a, b = request("a", list(range(9)), max_tokens=1), request("b", [*range(8), 50])
    target.add(a)
    first = target.schedule()
    target.add(b)
    second = target.schedule()
    assert first is not None and second is not None
    assert shape(second) == [("b", 8, 1)]
    assert target.fail(first, "lost") == [a]
    assert second.requests[0].is_void
    assert target.update(second, {}) == []
    assert shape(run(target)) == [("b", 0, 9)]
    assert b.output_token_ids == [7]


def test_one_request_can_fail_alone() -> None:
    target = scheduler()
    a, b = request("a", 3), request("b", 3)
    target.add(a)
    target.add(b)
    step = target.schedule()
    assert step is not None
    target.finish("a", "error", error="its logits are not finite")
    assert target.update(step, {"b": [4]}) == [b]
    assert (a.finish_reason, a.error, b.finish_reason) == ("error", "its logits are not finite", None)


def test_what_a_failed_request_computed_is_not_found_again() -> None:
    target = scheduler()
    target.add(request("a", list(range(9))))
    run(target)
    target.finish("a", "error", error="its logits are not finite")
    target.add(request("b", list(range(9))))
    assert shape(run(target)) == [("b", 0, 9)]


# -- drafts ------------------------------------------------------------------------------------------------------


def test_rejected_drafts_leave_no_trace() -> None:
    target = scheduler()
    a = request("a", 6, max_tokens=20)
    target.add(a)
    run(target)
    target.propose("a", [7, 8, 9])
    step = target.schedule()
    assert step is not None
    item = step.requests[0]
    assert (item.start, item.num_tokens, item.num_drafts, item.token_ids) == (6, 4, 3, [7, 7, 8, 9])
    assert item.sample
    target.update(step, {"a": [7, 5]})  # one of three accepted
    assert (a.computed, a.known, a.scheduled) == (8, 9, 0)
    assert a.output_token_ids == [7, 7, 5]
    assert shape(run(target)) == [("a", 8, 1)]
    keys = {key for cached in target.cache.pool.cached for key in cached}
    assert keys == set(a.block_keys)


def test_drafts_stop_at_the_end_of_the_request_and_at_a_stop_token() -> None:
    target = scheduler()
    a, b = request("a", 6, max_tokens=3), request("b", 6, max_tokens=20, eos_token_ids=frozenset({2}))
    for r in (a, b):
        target.add(r)
    run(target)
    target.propose("a", [7, 8, 9])
    target.propose("b", [2, 8])
    step = target.schedule()
    assert step is not None
    assert [(i.num_tokens, i.num_drafts) for i in step.requests] == [(2, 1), (3, 2)]
    target.update(step, {"a": [7, 4], "b": [2, 8, 3]})
    assert (a.output_token_ids, a.finish_reason) == ([7, 7, 4], "length")
    assert (b.output_token_ids, b.finish_reason) == ([7, 2], "stop")


def test_drafts_need_an_idle_decode() -> None:
    target = scheduler()
    target.add(request("a", 20))
    run(target)
    with pytest.raises(ValueError, match="cannot take drafts now"):
        target.propose("a", [1])


# -- refusals ----------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers() -> None:
    target = scheduler(max_model_len=10)
    with pytest.raises(CapacityError, match=r"has 10 tokens, but the context holds 10 .* at most 9 tokens"):
        target.add(request("a", 10))
    target.add(request("b", 9))
    run(target)
    assert target.stats().running == 0, "it ends with the one token that the context takes"


def test_a_request_that_can_never_fit_the_cache_is_refused_with_the_numbers() -> None:
    target = scheduler(num_blocks=5)
    with pytest.raises(
        CapacityError, match=r"need 5 KV cache blocks of 4 tokens, but the cache has 4: lower max_tokens"
    ):
        target.add(request("a", 10, max_tokens=8))
    a = request("b", 10, max_tokens=7)
    target.add(a)
    while target.has_work():
        run(target)
    assert a.num_output_tokens == 7


def test_other_bad_requests_are_refused() -> None:
    with pytest.raises(UserError, match=r"the prompt of request 'a' is empty \(0 tokens\)"):
        request("a", [])
    with pytest.raises(UserError, match="token id -3"):
        request("a", [4, -3])
    with pytest.raises(UserError, match="must be a list of integers"):
        request("a", [4, "5"])  # type: ignore[list-item]
    target = scheduler()
    target.add(request("a", 3))
    with pytest.raises(UserError, match="the id 'a' is still running"):
        target.add(request("a", 3))
    with pytest.raises(UserError, match="priority is 2, but the scheduling policy is 'fcfs'"):
        target.add(request("b", 3, priority=2))
    assert target.stats().waiting == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 3),
        ("max_model_len", 1),
        ("block_size", 0),
        ("policy", "lifo"),
        ("max_prefill_tokens_with_decodes", -1),
        ("max_steps_in_flight", 0),
    ],
)
def test_a_bad_limit_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=field) as error:
        scheduler(**{field: value})
    assert str(value) in str(error.value)
