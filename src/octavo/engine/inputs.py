"""Lays a scheduler step out as the tensors that the model reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.scheduler import Step
from octavo.layers.step import StepInputs
from octavo.ops import AttentionMetadata


@dataclass(slots=True)
class ModelInputs:
    """One step on the device. `sample_rows` are the rows of the hidden states whose next token is wanted."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    step: StepInputs
    sample_rows: Tensor  # int64 [R]


class BlockTables:
    """The block tables of all running requests in one array a cache group, a row a request.

    Tables only grow while a request runs, so a step writes the new entries alone. (Blocks that left a sliding window
    are the null block in the scheduler's table; here they may keep their old number, since no kernel reads them.)
    """

    def __init__(self, num_groups: int, max_num_seqs: int, max_blocks: int) -> None:
        self._tables = [np.zeros((max_num_seqs, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._rows: dict[str, int] = {}
        self._written: dict[str, list[int]] = {}  # request -> preemptions when written, then blocks written a group

    def update(self, step: Step) -> NDArray[Any]:
        """Bring the tables up to date; returns the row of each of the step's requests."""
        rows = np.empty(len(step.requests), dtype=np.int64)
        for i, item in enumerate(step.requests):
            name = item.request.request_id
            row = rows[i] = self._row(name)
            written = self._written.get(name)
            if written is None or written[0] != item.request.num_preemptions:
                written = self._written[name] = [item.request.num_preemptions] + [0] * len(self._tables)
            for group, (table, blocks) in enumerate(zip(self._tables, item.block_ids, strict=True), start=1):
                count = len(blocks)
                if count > written[group]:
                    table[row, written[group] : count] = blocks[written[group] :]
                    written[group] = count
        return rows

    def _row(self, request_id: str) -> int:
        row = self._rows.get(request_id)
        if row is None:
            if not self._free_rows:  # preempted requests keep their row while they wait
                size = len(self._tables[0])
                self._tables = [np.concatenate((table, np.zeros_like(table))) for table in self._tables]
                self._free_rows = list(range(size, 2 * size))[::-1]
            row = self._rows[request_id] = self._free_rows.pop()
        return row

    def gather(self, group: int, rows: NDArray[Any], num_blocks: int) -> NDArray[Any]:
        """The first `num_blocks` entries of the given rows: int32 [S, num_blocks]."""
        return np.ascontiguousarray(self._tables[group][rows, :num_blocks])

    def release(self, request_id: str) -> None:
        """Forget a request that ended."""
        row = self._rows.pop(request_id, None)
        self._written.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)


def build_inputs(
    step: Step, tables: BlockTables, num_groups: int, block_size: int, device: torch.device
) -> ModelInputs:
    """The tensors of a step; its requests come decodes first, as AttentionMetadata wants them."""
    items = step.requests
    num_tokens = np.fromiter((item.num_tokens for item in items), dtype=np.int32, count=len(items))
    starts = np.fromiter((item.start for item in items), dtype=np.int32, count=len(items))
    query_start = np.zeros(len(items) + 1, dtype=np.int32)
    np.cumsum(num_tokens, out=query_start[1:])
    seq_lens = starts + num_tokens
    total = int(query_start[-1])
    owner = np.arange(len(items))
    positions = starts.astype(np.int64)
    if total > len(items):  # a step of decodes, which comes once a token, has all it needs by now
        owner = np.repeat(owner, num_tokens)
        positions = np.arange(total) - query_start[:-1][owner] + positions[owner]
    input_ids = np.fromiter(chain.from_iterable(item.token_ids for item in items), dtype=np.int64, count=total)
    rows = tables.update(step)
    max_seq_len = int(seq_lens.max())
    max_query_len = 1 if total == len(items) else int(num_tokens.max())
    metadata = []

    def copy(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    put: Callable[[NDArray[Any]], Tensor] = torch.from_numpy if device.type == "cpu" else copy

    query_start_tensor, seq_lens_tensor = put(query_start), put(seq_lens)
    for group in range(num_groups):
        table = tables.gather(group, rows, -(-max_seq_len // block_size))
        blocks, places = np.divmod(positions, block_size)
        slots = table[owner, blocks].astype(np.int64) * block_size + places
        metadata.append(
            AttentionMetadata(
                query_start=query_start_tensor,
                seq_lens=seq_lens_tensor,
                block_table=put(table),
                slot_mapping=put(slots),
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                num_decodes=step.num_decodes,
            )
        )
    last_rows = query_start[1:].astype(np.int64) - 1
    sampled = np.fromiter((item.sample for item in items), dtype=bool, count=len(items))
    return ModelInputs(put(input_ids), put(positions), StepInputs(tuple(metadata)), put(last_rows[sampled]))
