"""Decodes whose contexts begin alike: what they share, and that padding a step to such a shape changes no token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ScheduledRequest
from octavo.engine import shared_prefix
from octavo.engine.config import EngineConfig
from octavo.engine.device_runner import DeviceRunner
from octavo.engine.engine import Engine
from octavo.engine.graphs import DecodeGraphs
from octavo.engine.messages import EngineRequest
from octavo.engine.packing import DecodeShape
from octavo.engine.shared_prefix import MIN_REQUESTS, num_shared_tokens

BLOCK = 16


def decodes(tables: list[list[int]], starts: list[int]) -> list[ScheduledRequest]:
    return [
        ScheduledRequest(Request(str(i), [1], SamplingParams()), start, 1, [1], [table], True)
        for i, (table, start) in enumerate(zip(tables, starts, strict=True))
    ]


@pytest.mark.parametrize(
    ("common", "starts", "expected"),
    [(140, [2400], 2240), (140, [2500, 2250], 2240), (140, [2500, 2200], 2192), (127, [2400], 0), (0, [400], 0)],
)
def test_whole_blocks_that_all_hold(common: int, starts: list[int], expected: int) -> None:
    tables = [[*range(1, common + 1), *range(1000 * (i + 1), 1000 * (i + 1) + 40)] for i in range(MIN_REQUESTS)]
    random.Random(0).shuffle(tables)
    lengths = (starts * MIN_REQUESTS)[:MIN_REQUESTS]
    assert num_shared_tokens(decodes(tables, lengths), BLOCK) == expected
    assert num_shared_tokens(decodes(tables[1:], lengths[1:]), BLOCK) == 0  # too few requests


def test_one_request_may_share_less_than_the_others() -> None:
    tables = [[*range(1, 151), 1000 + i] for i in range(MIN_REQUESTS)]
    tables[7][130:] = range(200, 221)
    assert num_shared_tokens(decodes(tables, [2400] * MIN_REQUESTS), BLOCK) == 130 * BLOCK
    tables[3][0] = 78  # the tokens of that block are the same, or the next one would not be shared
    assert num_shared_tokens(decodes(tables, [2400] * MIN_REQUESTS), BLOCK) == 130 * BLOCK


class Calls(DecodeGraphs):
    """In place of graphs, which a CPU has not: what they would replay is called, on the same views."""

    def __init__(self, runner: DeviceRunner) -> None:
        super().__init__(runner._model, runner._state, None)
        self._runner = runner
        for size, num_shared in runner.decode_shapes():
            self._sizes[num_shared > 0].append(size)
        self.used: set[DecodeShape] = set()

    def run_body(self, shape: DecodeShape) -> torch.Tensor:
        self.used.add(shape)
        packed = self._state.decode_of(shape)
        assert packed.num_shared is None or packed.num_shared.tolist() == [shape.num_shared]
        self.hidden = self._body(packed)
        return self.hidden

    def run_head(self, shape: DecodeShape, is_greedy: bool) -> None:
        head = self._runner._greedy_head if is_greedy else self._runner._sampling_head
        packed = self._state.decode_of(shape)
        head(self.hidden, packed.rows, self._state.tensors.seq_lens[: shape.num_requests])


def test_a_step_padded_to_such_a_shape_gives_the_same_tokens(tiny_llama: Path, monkeypatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_READS", 16 * 32)

    def answers(with_graphs: bool) -> tuple[dict[str, list[int]], set[DecodeShape]]:
        engine = Engine(EngineConfig(model=str(tiny_llama), dtype="float32", async_scheduling=True, max_num_seqs=20))
        runner = engine._runner
        assert isinstance(runner, DeviceRunner)
        calls = Calls(runner)
        if with_graphs:
            runner._graphs = calls
            monkeypatch.setattr(runner, "_prompt_graphs", type("None_", (), {"shape_for": lambda self, step: None})())
        for i in range(18):
            prompt = [3 + j % 90 for j in range(40)] + [5 + i] * (i % 5)
            params = SamplingParams(temperature=0.0, max_tokens=4 + i % 7, ignore_eos=True)
            engine.add(EngineRequest(str(i), prompt, params))
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
        return found, calls.used

    found, used = answers(with_graphs=True)
    assert found == answers(with_graphs=False)[0]
    assert DecodeShape(20, 32) in used and any(not shape.num_shared for shape in used)
