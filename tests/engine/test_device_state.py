"""What the device makes of a packed step, against the layout that the host makes of the same step."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from octavo.core.cache_groups import CacheGroup, KVCacheSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.core.step import ScheduledRequest, Step
from octavo.engine import device_state
from octavo.engine.device_state import DeviceState
from octavo.engine.graphs import decode_shapes
from octavo.engine.inputs import BlockTables, build_inputs
from octavo.engine.packing import DecodeShape, PromptShape
from octavo.engine.prompt_graphs import MAX_PROMPT_PAIRS, fitting_shape, prompt_shapes, tokens_that_pay
from octavo.engine.sampler import SamplingRow
from octavo.ops import keep_tokens, sampling_inputs

CPU = torch.device("cpu")
FULL = CacheGroup(KVCacheSpec("full", 1, 16), [0])
SLIDING = CacheGroup(KVCacheSpec("sliding", 1, 16, window=24), [1])


def row_of(request: Request, seed: int = 0) -> SamplingRow:
    return SamplingRow(request.params, seed, request.tokens, request.num_prompt_tokens, frozenset(), [])


def make(groups: list[CacheGroup], num_blocks: int, max_num_seqs: int, budget: int) -> tuple[Scheduler, DeviceState]:
    config = SchedulerConfig(max_num_seqs, budget, 256, block_size=8)
    state = DeviceState(len(groups), 8, max_num_seqs, 256, budget, CPU, 2)
    return Scheduler(config, groups, num_blocks), state


@pytest.mark.parametrize("groups", [[FULL], [FULL, SLIDING]], ids=["full", "full+sliding"])
@pytest.mark.parametrize("min_updates", [8192, 1], ids=["", "tables sent apart"])
def test_inputs_equal_those_laid_out_on_the_host(groups, min_updates: int, monkeypatch) -> None:
    monkeypatch.setattr(device_state, "_MIN_UPDATES", min_updates)
    rng = random.Random(0)
    scheduler, state = make(groups, num_blocks=36, max_num_seqs=4, budget=24)
    tables = BlockTables(len(groups), 4, 32)
    preempted = 0
    for i in range(30):
        prompt = [rng.randrange(100) for _ in range(rng.choice([1, 5, 60, 100]))]
        request = Request(str(i), prompt, SamplingParams(max_tokens=rng.randrange(1, 60)))
        scheduler.add(request)
        state.add(request, row_of(request))
    while (step := scheduler.schedule()) is not None:
        expected = build_inputs(step, tables, len(groups), 8, CPU)
        packed = state.send(step)
        ids, positions, inputs = state.prepare(packed)
        assert torch.equal(ids, expected.input_ids) and torch.equal(positions, expected.positions)
        for found, wanted in zip(inputs.metadata, expected.step.metadata, strict=True):
            assert torch.equal(found.seq_lens, wanted.seq_lens)
            assert torch.equal(found.query_start, wanted.query_start)
            assert torch.equal(found.slot_mapping, wanted.slot_mapping)
            assert (found.max_query_len, found.max_seq_len) == (wanted.max_query_len, wanted.max_seq_len)
            assert found.num_decodes == wanted.num_decodes
            for s, length in enumerate(wanted.seq_lens.tolist()):
                used = -(-length // 8)
                assert torch.equal(found.block_table[s, :used], wanted.block_table[s, :used])
        rows = packed.samples[0].long() if packed.samples is not None else torch.arange(len(step.requests))
        assert torch.equal(rows, expected.sample_rows)
        sampled = {item.request.request_id: [rng.randrange(100)] for item in step.requests if item.sample}
        for request in scheduler.update(step, sampled):
            if request.is_finished:
                state.remove(request.request_id)
                tables.release(request.request_id)
        preempted = scheduler.stats().preemptions
    assert preempted > 0
    assert not scheduler.has_work()


def test_a_token_in_flight_is_read_on_the_device_and_padding_computes_nothing() -> None:
    config = SchedulerConfig(4, 64, 256, block_size=8, max_steps_in_flight=2)
    scheduler, state = Scheduler(config, [FULL], 60), DeviceState(1, 8, 4, 256, 64, CPU, 3)
    for name in "ab":
        request = Request(name, [1, 2, 3], SamplingParams(max_tokens=9, seed=3))
        scheduler.add(request)
        state.add(request, row_of(request))
    first = scheduler.schedule()
    assert first is not None
    packed = state.send(first)
    assert packed.samples is not None and packed.samples[0].tolist() == [2, 5]
    keep_tokens(state.state, packed.samples[1], torch.tensor([41, 42]), state.sampled[:2])
    second = scheduler.schedule()
    assert second is not None and [item.token_ids for item in second.requests] == [[-1], [-1]]
    ids, positions, inputs = state.prepare(state.send(second, padding=DecodeShape(4)))
    assert ids.tolist() == [41, 42, 0, 0]
    assert positions.tolist() == [3, 3, 0, 0]
    assert inputs.metadata[0].seq_lens.tolist() == [4, 4, 0, 0]
    assert inputs.metadata[0].slot_mapping[2:].tolist() == [-1, -1]
    assert (inputs.metadata[0].slot_mapping[:2] >= 8).all()


@pytest.mark.parametrize("groups", [[FULL], [FULL, SLIDING]], ids=["full", "full+sliding"])
def test_a_padded_step_of_prompts_is_the_step_and_rows_without_a_slot(groups: list[CacheGroup]) -> None:
    rng = random.Random(1)
    scheduler, state = make(groups, num_blocks=60, max_num_seqs=5, budget=32)
    shapes = prompt_shapes(5, 32)
    assert shapes == [PromptShape(5, 16), PromptShape(5, 32)]
    for i in range(12):
        prompt = [rng.randrange(100) for _ in range(rng.choice([1, 5, 32, 50]))]
        request = Request(str(i), prompt, SamplingParams(max_tokens=rng.randrange(1, 9)))
        scheduler.add(request)
        state.add(request, row_of(request))
    used = set()
    while (step := scheduler.schedule()) is not None:
        count, total = len(step.requests), step.num_tokens
        shape = None if step.num_decodes == count else fitting_shape(shapes, step)
        state.send(step, shape)
        if shape is not None:
            wanted = [part.clone() for part in flat(state.prepare(state.send(step)))]
            state.send(step, shape)  # the state is as it was, and the buffers are written anew
            found = flat(state.prepare(state.prompts_of(shape), 32))
            sizes = [total] * 2 + [count, count + 1] + [total] * len(groups)
            for whole, part, size in zip(found, wanted, sizes, strict=True):
                assert torch.equal(whole[:size], part)
            ids, positions, lengths, query_start, *slots = found
            assert len(ids) == shape.num_tokens and len(lengths) == shape.max_requests + 1
            assert not ids[total:].any() and not positions[total:].any() and not lengths[count:].any()
            assert all((part[total:] == -1).all() for part in slots)
            assert query_start.tolist()[count + 1 :] == [total] * (shape.max_requests - count) + [shape.num_tokens]
            assert state.prompts_of(shape).counts.tolist() == [step.num_decodes, count]
            used.add((shape.num_tokens, total == shape.num_tokens, count == shape.max_requests, step.num_decodes > 0))
        sampled = {item.request.request_id: [rng.randrange(100)] for item in step.requests if item.sample}
        for request in scheduler.update(step, sampled):
            if request.is_finished:
                state.remove(request.request_id)
    for place, wanted_values in enumerate([{16, 32}, {False, True}, {False, True}, {False, True}]):
        assert {kind[place] for kind in used} == wanted_values


def flat(prepared) -> list[torch.Tensor]:
    ids, positions, inputs = prepared
    first = inputs.metadata[0]
    return [ids, positions, first.seq_lens, first.query_start, *[meta.slot_mapping for meta in inputs.metadata]]


def test_padding_for_warming_up_computes_nothing() -> None:
    _, state = make([FULL], num_blocks=60, max_num_seqs=4, budget=32)
    state.packed.fill_(7)
    shape = PromptShape(4, 16)
    state.send_padding(state.prompts_of(shape))
    prepared = state.prepare(state.prompts_of(shape), 32)
    ids, positions, lengths, query_start, slots = flat(prepared)
    assert prepared[2].metadata[0].counts.tolist() == [0, 0] and prepared[2].metadata[0].num_decodes == 0
    assert not ids.any() and not positions.any() and not lengths.any() and (slots == -1).all()
    assert query_start.tolist() == [0, 0, 0, 0, 0, 16]


def test_steps_that_no_graph_of_prompts_serves_well_have_no_shape() -> None:
    shapes = prompt_shapes(256, 8192)
    assert shapes == sorted(shapes, key=lambda shape: (shape.num_tokens, shape.max_requests))
    assert [shape.max_requests for shape in shapes if shape.num_tokens == 512] == [128, 256]
    assert [shape.max_requests for shape in shapes if shape.num_tokens == 64] == [64]
    assert [PromptShape(256, n).max_prompts for n in (16, 512, 640, 2304)] == [32, 32, 40, 144]
    assert shapes[0] == PromptShape(16, 16) and shapes[-1] == PromptShape(256, 2304)
    assert prompt_shapes(4, 8) == []
    assert prompt_shapes(4, 600)[-2:] == [PromptShape(4, 544), PromptShape(4, 576)]

    def shape_of(num_requests: int, num_tokens: int, past: int = 0, num_prompts: int = 1) -> PromptShape | None:
        """Of a step of decodes far on, and of prompts, the last with `past` tokens before it."""
        places = [(100_000, 1)] * (num_requests - num_prompts) + [(0, 1)] * (num_prompts - 1)
        places.append((past, num_tokens - num_requests + 1))
        request = Request("r", [1], SamplingParams())
        items = [ScheduledRequest(request, first, count, [1], [[]], sample=False) for first, count in places]
        return fitting_shape(shapes, Step(0, items, num_tokens, num_decodes=num_requests - num_prompts))

    assert shape_of(2, 12) == PromptShape(16, 16) and shape_of(2, 17) == PromptShape(32, 32)
    assert shape_of(40, 60) == PromptShape(64, 64) and shape_of(129, 512) == PromptShape(256, 512)
    assert shape_of(40, 60, num_prompts=32) == PromptShape(64, 64)
    assert shape_of(40, 60, num_prompts=33) == PromptShape(128, 544)
    assert shape_of(2, 513) == PromptShape(128, 544) and shape_of(129, 2304 - 1500) == PromptShape(256, 1024)
    assert shape_of(2, 2305) is None and shape_of(257, 400) is None
    most = MAX_PROMPT_PAIRS // 500 - 500
    assert shape_of(2, 501, past=most) is not None and shape_of(2, 501, past=most + 1) is None


def test_writing_padding_leaves_requests_alone() -> None:
    state = DeviceState(2, 8, 4, 256, 64, CPU, 2)
    state.state.flat.fill_(7)
    state.write_padding()
    assert (state.state.tokens == 7).all() and (state.state.sampling == 7).all()
    assert all((table[:4] == 7).all() for table in state.state.tables)
    assert state.state.tables[0][4, :4].tolist() == [0, 0, 0, 0]


def test_sampling_parameters_reach_the_device_as_they_were_given() -> None:
    scheduler, state = make([FULL], num_blocks=60, max_num_seqs=4, budget=64)
    given = [
        (SamplingParams(temperature=0.7, top_p=0.9, min_p=0.05, top_k=40), (1 << 63) + 5),
        (SamplingParams(temperature=0.0), -3),
        (SamplingParams(temperature=1.5, top_k=-1), 12),
    ]
    for i, (params, seed) in enumerate(given):
        request = Request(str(i), [1] * (i + 1), params)
        scheduler.add(request)
        state.add(request, row_of(request, seed))
    step = scheduler.schedule()
    assert step is not None
    packed = state.send(step)
    assert packed.samples is not None
    by_name = {item.request.request_id: i for i, item in enumerate(step.requests)}
    order = [by_name[str(i)] for i in range(3)]
    temperature, top_k, top_p, min_p, seeds, position = (
        values[order] for values in sampling_inputs(state.state, packed.samples[1], packed.samples[2])
    )
    assert temperature.tolist() == pytest.approx([0.7, 0.0, 1.5]) and top_k.tolist() == [40, 0, 0]
    assert top_p.tolist() == pytest.approx([0.9, 1.0, 1.0]) and min_p.tolist() == pytest.approx([0.05, 0.0, 0.0])
    assert seeds.tolist() == [(1 << 63) + 5 - (1 << 64), -3, 12]
    assert position.tolist() == [0, 0, 0]


def test_graphs_of_prompts_reach_as_far_as_launching_takes_longer_than_computing() -> None:
    llama_8b, qwen_600m = 218_000_000 * 32, 15_700_000 * 28
    assert 704 <= tokens_that_pay(32, llama_8b, 132) < 768
    assert tokens_that_pay(28, qwen_600m, 132) > 3 * 2304
    assert tokens_that_pay(32, llama_8b, 66) == tokens_that_pay(32, llama_8b, 132) // 2


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 16, 100, 256, 257, 512, 1000, 1024])
def test_decode_shapes_end_at_the_most_requests(most: int) -> None:
    shapes = decode_shapes(most, can_share=True)
    assert [shape for shape in shapes if not shape.num_shared] == decode_shapes(most, can_share=False)
    for kind, smallest in (0, 1), (1, 16):
        sizes = [size for size, num_shared in shapes if num_shared == kind]
        assert sizes == sorted(set(sizes))
        assert sizes == [] if most < smallest else (sizes[0], sizes[-1]) == (smallest, most)
        assert all(b <= max(a * 2, a + 32) for a, b in pairwise(sizes))
