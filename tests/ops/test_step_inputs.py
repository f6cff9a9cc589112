"""Requests' state on the device, and rows that pad a step."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import KVCache, RequestState, write_state

CPU = torch.device("cpu")


def test_the_parts_of_the_state_are_views_of_one_vector() -> None:
    state = RequestState.allocate(3, 5, 2, CPU)
    places = [state.offsets[0] + 2, state.offsets[1] + 8, state.offsets[2] + 1, state.offsets[3] + 5 + 4]
    write_state(state, torch.tensor(places, dtype=torch.int32), torch.tensor([1, 2, 3, 4], dtype=torch.int32))
    assert state.tokens.tolist() == [0, 0, 1]
    assert state.sampling[1, 0] == 2
    assert state.tables[0][0, 1] == 3 and state.tables[1][1, 4] == 4
    assert int(state.flat.count_nonzero()) == 4


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_row_without_a_slot_is_not_written(interleaved: bool) -> None:
    cache = KVCache.allocate(3, 16, 2, 8, torch.float32, interleaved=interleaved)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    cache.scatter(torch.tensor([17, -1, 40]), k, v)
    keys, values = cache.gather(torch.arange(3))
    assert torch.equal(keys[:, [17, 40]], k[[0, 2]].transpose(0, 1))
    assert torch.equal(values[:, [17, 40]], v[[0, 2]].transpose(0, 1))
    assert int(keys.count_nonzero()) == int(values.count_nonzero()) == 2 * 2 * 8
