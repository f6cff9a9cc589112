"""What the scheduler picks, in cases worked out by hand; the state machine covers the rest."""

from __future__ import annotations

import pytest
from scheduler_helpers import request, run, scheduler, shape

from octavo.core.request import RequestStatus


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


def test_decodes_may_have_tokens_of_their_own() -> None:
    target = scheduler(max_prefill_tokens=14)
    target.add(request("a", 14))
    target.add(request("b", 30))
    assert shape(run(target)) == [("a", 0, 14)]  # nobody decodes, and yet 14 of 16
    assert shape(run(target)) == [("a", 14, 1), ("b", 0, 14)]
    assert shape(run(target)) == [("a", 15, 1), ("b", 14, 14)]


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
