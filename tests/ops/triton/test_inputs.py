"""The kernels around the model against their definitions in torch."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import RequestState, StepTensors, step_inputs
from octavo.ops.triton import inputs


def random_state(device: torch.device, rows: int = 9, blocks: int = 40, groups: int = 2) -> RequestState:
    state = RequestState.allocate(rows, blocks, groups, device)
    state.flat.copy_(torch.randint(1, 1000, state.flat.shape))
    return state


def outputs(device: torch.device, num_seqs: int, num_tokens: int, width: int) -> StepTensors:
    def fill(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, -7, dtype=dtype, device=device)

    return StepTensors(
        fill(num_tokens),
        fill(num_tokens),
        fill(num_seqs, dtype=torch.int32),
        tuple(fill(num_seqs, 64, dtype=torch.int32)[:, :width] for _ in range(2)),
        tuple(fill(num_tokens) for _ in range(2)),
    )


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [1, 1, 7, 30], [300], [1]])
def test_prepare_inputs(device: torch.device, counts: list[int]) -> None:
    state = random_state(device)
    count = torch.tensor(counts, dtype=torch.int32, device=device)
    query_start = torch.zeros(len(counts) + 1, dtype=torch.int32, device=device)
    query_start[1:] = count.cumsum(0)
    starts = torch.randint(0, 300, (len(counts),), dtype=torch.int32).to(device)
    if max(counts) == 1:
        starts[-1] = -1  # padding
    rows = torch.randperm(9)[: len(counts)].int().to(device)
    tokens = torch.randint(-1, 5, (sum(counts),), dtype=torch.int32).to(device)
    found, wanted = (outputs(device, len(counts), sum(counts), 40) for _ in range(2))
    arguments = (rows, starts, query_start, tokens, state, 16, max(counts))
    inputs.prepare_inputs(*arguments, found)
    step_inputs._prepare_inputs(*arguments, wanted)
    assert torch.equal(found.input_ids, wanted.input_ids)
    assert torch.equal(found.positions, wanted.positions)
    assert torch.equal(found.seq_lens, wanted.seq_lens)
    for group in range(2):
        assert torch.equal(found.slot_mappings[group], wanted.slot_mappings[group])
        for s, length in enumerate(wanted.seq_lens.tolist()):
            used = -(-length // 16)
            assert torch.equal(found.block_tables[group][s, :used], wanted.block_tables[group][s, :used])


@pytest.mark.parametrize("count", [1, 300])
def test_write_state(device: torch.device, count: int) -> None:
    state = random_state(device)
    places = torch.randperm(len(state.flat))[:count].int().to(device)
    values = torch.randint(-5, 1000, (count,), dtype=torch.int32).to(device)
    expected = state.flat.clone()
    expected[places.long()] = values
    inputs.write_state(places, values, state)
    assert torch.equal(state.flat, expected)


@pytest.mark.parametrize("count", [1, 8])
def test_sampling_inputs_and_tokens(device: torch.device, count: int) -> None:
    state = random_state(device)
    state.sampling[:, 4:6] = torch.randint(-(2**31), 2**31 - 1, (9, 2), dtype=torch.int64).int()
    rows = torch.randperm(9)[:count].int().to(device)
    ends = torch.randint(1, 3000, (count,), dtype=torch.int32).to(device)
    found = inputs.sampling_inputs(rows, ends, state)
    for a, b in zip(found, step_inputs._sampling_inputs(rows, ends, state), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    other = RequestState(state.flat.clone(), *(None,) * 4)  # type: ignore[arg-type]
    sampled = torch.randint(-1, 1000, (count,)).to(device)
    out = torch.zeros(count, dtype=torch.int64, device=device)
    inputs.keep_tokens(rows, sampled, state, out)
    assert torch.equal(out, sampled)
    expected = other.flat.clone()
    expected[rows.long()] = sampled.int()
    assert torch.equal(state.flat, expected)
