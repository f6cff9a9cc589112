from __future__ import annotations

import itertools

import pytest

from octavo.core.cache_groups import CACHE_KINDS, KVCacheSpec, cache_layout, group_layers
from octavo.errors import UserError

FULL = KVCacheSpec("full", 8, 128)
SLIDING = KVCacheSpec("sliding", 8, 128, window=1024)


def test_bytes_follow_from_the_shape() -> None:
    assert FULL.bytes_per_token * 80 == 320 * 1024  # Llama-3-70B: 320 KiB a token in 16 bits
    assert KVCacheSpec("full", 8, 128, bytes_per_element=1).bytes_per_token == 2048


@pytest.mark.parametrize(
    ("kind", "window", "says"),
    [("round", None, "'round' is unknown"), ("sliding", None, "window None"), ("full", 5, "window 5")],
)
def test_a_bad_specification_is_refused(kind: str, window: int | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        KVCacheSpec(kind, 8, 128, window)


def test_a_window_holds_at_least_the_token_itself() -> None:
    with pytest.raises(UserError, match="window is 0"):
        KVCacheSpec("sliding", 8, 128, 0)


def test_one_kind_is_one_group() -> None:
    groups = group_layers([FULL] * 30)
    assert [group.layers for group in groups] == [list(range(30))]
    layout = cache_layout(groups)
    assert layout.slot_of_layer == list(range(30))
    assert layout.bytes_per_block(16) == 30 * 16 * FULL.bytes_per_token


def test_kinds_are_split_so_that_no_memory_is_idle() -> None:
    specs = [FULL if layer % 6 == 5 else SLIDING for layer in range(26)]  # Gemma 3: 22 sliding, 4 full
    groups = group_layers(specs)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(26))
    assert all(specs[layer] == group.spec for group in groups for layer in group.layers)
    assert max(len(group.layers) for group in groups) == 4
    layout = cache_layout(groups)
    assert len(layout.slots) == 4
    for group in groups:  # within a group every layer has a tensor of its own
        slots = [layout.slot_of_layer[layer] for layer in group.layers]
        assert len(set(slots)) == len(slots)


def test_many_layers_of_one_kind_beside_one_of_another_stay_few_groups() -> None:
    groups = group_layers([FULL] + [SLIDING] * 63)
    assert len(groups) <= 9
    assert cache_layout(groups).slots[0] == FULL


def test_layers_of_another_shape_share_no_tensor() -> None:
    groups = group_layers([FULL, KVCacheSpec("sliding", 4, 128, 16)])
    assert cache_layout(groups).slot_of_layer == [0, 1]


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(UserError, match="no layer that keeps a KV cache"):
        group_layers([])


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_the_longest_hit_is_found(window: int | None, block_size: int) -> None:
    """Against the definition: the largest n such that blocks [first_needed(n) .. n) are all cached."""
    spec = KVCacheSpec("full" if window is None else "sliding", 1, 1, window)
    for cached in itertools.product((False, True), repeat=6):

        def is_hit(n: int, cached: tuple[bool, ...] = cached) -> bool:
            first = 0 if window is None else max(0, n * block_size - window + 1)
            return all(cached[position // block_size] for position in range(first, n * block_size))

        for limit in range(7):
            expected = max(n for n in range(limit + 1) if is_hit(n))
            assert spec.behaviour.longest_hit(spec, cached.__getitem__, limit, block_size) == expected


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_max_blocks_bounds_what_a_sequence_touches(window: int | None) -> None:
    spec = KVCacheSpec("full" if window is None else "sliding", 1, 1, window)
    kind = CACHE_KINDS[spec.kind]
    for size, in_flight, length in itertools.product((1, 2, 4), (1, 3, 8), (1, 5, 20)):
        bound = kind.max_blocks(spec, length, in_flight, size)
        for computed in range(length):
            first = kind.first_needed(spec, computed) // size
            end = -(-min(length, computed + in_flight) // size)
            assert end - first <= bound
