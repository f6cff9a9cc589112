from __future__ import annotations

import random

import pytest

from octavo.core.block_pool import NULL_BLOCK, BlockPool, chained_key, root_key
from octavo.errors import UserError


def test_blocks_are_taken_least_recently_used_first_and_the_null_block_never() -> None:
    pool = BlockPool(6)
    taken = pool.allocate(5)
    assert taken == [1, 2, 3, 4, 5]
    for block_id in taken:
        pool.publish(0, bytes([block_id]), block_id)
    pool.release([4, 2, 5])
    assert pool.num_free == 3
    assert pool.allocate(2) == [4, 2]
    assert pool.usage == pytest.approx(4 / 5)


def test_a_block_without_a_key_is_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    pool.publish(0, b"a", 1)
    pool.release([1, 2])
    assert pool.allocate(1) == [2]
    assert b"a" in pool.cached[0]


def test_eviction_is_lazy_and_leaves_no_key_behind() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.publish(0, b"a", 1)
    pool.publish(0, b"b", 2)
    pool.release([2, 1])
    assert set(pool.cached[0]) == {b"a", b"b"}
    assert pool.allocate(1) == [2]
    assert set(pool.cached[0]) == {b"a"}
    assert pool.blocks[2].key is None


def test_a_hit_takes_a_block_out_of_the_middle_of_the_free_list() -> None:
    pool = BlockPool(5)
    for block_id in pool.allocate(4):
        pool.publish(0, bytes([block_id]), block_id)
    pool.release([1, 2, 3, 4])
    pool.share(2)
    pool.share(2)
    assert (pool.num_free, pool.blocks[2].ref_count) == (3, 2)
    assert pool.allocate(3) == [1, 3, 4]
    pool.release([2])
    assert pool.num_free == 0
    pool.release([2])
    assert pool.num_free == 1


def test_freeing_twice_is_an_assertion_and_the_null_block_is_skipped() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.release([NULL_BLOCK, 1])
    with pytest.raises(AssertionError, match="block 1 was freed twice"):
        pool.release([1])
    assert pool.blocks[NULL_BLOCK].ref_count == 1


def test_the_first_block_of_a_content_stays_the_one() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    assert pool.publish(0, b"a", 1) is pool.blocks[1]
    assert pool.publish(0, b"a", 2) is None
    assert pool.cached[0][b"a"].id == 1


def test_groups_have_keys_of_their_own() -> None:
    pool = BlockPool(4, num_groups=2)
    pool.allocate(2)
    pool.publish(0, b"a", 1)
    pool.publish(1, b"a", 2)
    assert [cached[b"a"].id for cached in pool.cached] == [1, 2]
    pool.withdraw(pool.blocks[2])
    pool.withdraw(pool.blocks[2])
    assert (len(pool.cached[0]), len(pool.cached[1])) == (1, 0)
    pool.clear_cache()
    assert not pool.cached[0]
    assert pool.blocks[1].key is None


def test_nothing_is_cached_when_caching_is_off() -> None:
    pool = BlockPool(3, enable_caching=False)
    pool.allocate(1)
    assert pool.publish(0, b"a", 1) is None
    assert not pool.cached[0]


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(UserError, match=f"has {num_blocks} blocks; it needs at least 2"):
        BlockPool(num_blocks)


def test_a_key_names_salt_parent_and_tokens() -> None:
    roots = [root_key(salt) for salt in (None, "", "a", "b")]
    keys = {chained_key(root, tokens) for root in roots for tokens in ([1, 2], [2, 1], [1, 2, 3], [258], [1, 1 << 30])}
    assert len(keys) == 20
    assert chained_key(roots[0], [1, 2]) == chained_key(root_key(None), (1, 2))


def test_the_free_list_equals_a_plain_list_under_random_use() -> None:
    rng = random.Random(5)
    pool, free, taken = BlockPool(20), list(range(1, 20)), []
    for _ in range(3000):
        if rng.random() < 0.5 and free:
            count = rng.randint(1, len(free))
            expected, free = free[:count], free[count:]
            assert pool.allocate(count) == expected
            taken += expected
        elif taken:
            block_id = taken.pop(rng.randrange(len(taken)))
            is_cached = rng.random() < 0.5 and pool.publish(0, rng.randbytes(8), block_id) is not None
            pool.release([block_id])
            free = [*free, block_id] if is_cached else [block_id, *free]
        assert pool.num_free == len(free)
