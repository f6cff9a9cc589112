"""How requests end, fail, take drafts and are refused."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_helpers import request, run, scheduler, shape

from octavo.errors import CapacityError, UserError


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
