"""Who shares blocks with whom, and what is never shared."""

from __future__ import annotations

from scheduler_helpers import request, run, scheduler, shape


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
