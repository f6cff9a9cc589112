"""Requests' state on the device, and the one packed copy that a step sends to it.

The device keeps each request's newest token, sampling parameters and block tables in a row of `ops.RequestState`. A
step sends one vector of int32: which rows it computes and from where, prompt tokens, the rows that sample, and the
entries of the state that changed. Operations on the device make the model's inputs of it, so nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo import ops
from octavo.core.request import Request, RequestStatus
from octavo.core.step import ScheduledRequest, Step
from octavo.engine.packing import DecodeShape, Layout, Padding, PromptShape, Staging, aligned, pack, words_needed
from octavo.engine.sampler import SamplingRow
from octavo.layers.step import StepInputs
from octavo.ops import AttentionMetadata

_MIN_UPDATES = 8192  # changed entries of the state that the packed vector has room for
_RUNNING = RequestStatus.RUNNING


@dataclass(slots=True)
class _Entry:
    """Where a request's state is; `row` is -1 while it has none."""

    sampling: list[int]
    row: int = -1
    preemptions: int = -1  # of the request when its row was written
    written: list[int] | None = None  # table entries on the device, a cache group
    request: Request | None = None


@dataclass(slots=True)
class PackedStep:
    """A step on the device: views of the packed vector.

    rows, starts: int32 [S] with padding. tokens: int32 [T]. query_start: int32 [S + 1]. samples: int32 [3, R] (row of
    the hidden states, row of the state, sequence length), or None where all requests decode and sample. num_shared:
    int32 [1], leading tokens that all have in common; counts: int32 [2], the numbers of decodes and of requests; None
    where the device need not know them.
    """

    staging: Staging
    layout: Layout
    rows: Tensor
    starts: Tensor
    tokens: Tensor
    query_start: Tensor
    samples: Tensor | None
    num_decodes: int
    num_shared: Tensor | None = None
    counts: Tensor | None = None


class DeviceState:
    """Owns the state and the buffers of inputs; `max_num_seqs` rows, and one more that padding points to."""

    def __init__(
        self,
        num_groups: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device,
        num_staging: int,
    ) -> None:
        self.block_size, self.max_num_seqs, self.max_model_len = block_size, max_num_seqs, max_model_len
        self.max_num_batched_tokens, self.device = max_num_batched_tokens, device
        self._num_blocks = -(-max_model_len // block_size)
        self.state = ops.RequestState.allocate(max_num_seqs + 1, self._num_blocks, num_groups, device)
        self._padding_row = max_num_seqs
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._entries: dict[str, _Entry] = {}
        self._table_offsets = self.state.offsets[2:]
        num_words = words_needed(max_num_seqs, max_num_batched_tokens)
        num_words += 2 * max(_MIN_UPDATES, 4 * max_num_seqs * num_groups)
        self._staging = [Staging(num_words, max_num_seqs, device) for _ in range(num_staging)]
        self._next_staging = 0
        self.packed = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._one_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self.tensors = self._allocate_tensors(max_num_batched_tokens, num_groups)
        self.sampled = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def _allocate_tensors(self, num_tokens: int, num_groups: int) -> ops.StepTensors:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        most = self.max_num_seqs + 1  # with the request that has padded tokens
        tables = (most, self._num_blocks)
        return ops.StepTensors(
            zeros(num_tokens),
            zeros(num_tokens),
            zeros(most, dtype=torch.int32),
            tuple(zeros(*tables, dtype=torch.int32) for _ in range(num_groups)),
            tuple(zeros(num_tokens) for _ in range(num_groups)),
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request, row: SamplingRow) -> None:
        """Make a request known; it takes a row when it is first scheduled."""
        self._entries[request.request_id] = _Entry(_sampling_words(row))

    def remove(self, request_id: str) -> None:
        """Forget a request that ended. Steps in flight may use its row; later ones come after them on the device."""
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.row >= 0:
            self._free_rows.append(entry.row)

    def _place(self, entry: _Entry, request: Request, places: list[int], values: list[int]) -> list[int]:
        """Give a request a row with its sampling parameters and an empty table."""
        if entry.row < 0:
            if not self._free_rows:
                self._reclaim()
            entry.row, entry.request = self._free_rows.pop(), request
            first = self.state.offsets[1] + entry.row * ops.NUM_SAMPLING_WORDS
            places.extend(range(first, first + ops.NUM_SAMPLING_WORDS))
            values.extend(entry.sampling)
        entry.preemptions = request.num_preemptions
        entry.written = [0] * len(self._table_offsets)
        return entry.written

    def _reclaim(self) -> None:
        """Take the rows of preempted requests, which write theirs anew when they run again."""
        for entry in self._entries.values():
            if entry.row >= 0 and entry.request is not None and entry.request.status is not _RUNNING:
                self._free_rows.append(entry.row)
                entry.row = entry.preemptions = -1

    def _locate(self, items: Sequence[ScheduledRequest], places: list[int], values: list[int]) -> list[int]:
        """The rows of a step's requests; appends the entries of the state that changed."""
        rows = []
        entries = self._entries
        for item in items:
            request = item.request
            entry = entries[request.request_id]
            written = entry.written
            if entry.preemptions != request.num_preemptions or written is None:
                written = self._place(entry, request, places, values)
            rows.append(entry.row)
            for group, blocks in enumerate(item.block_ids):
                if len(blocks) > written[group]:
                    first = self._table_offsets[group] + entry.row * self._num_blocks
                    places.extend(range(first + written[group], first + len(blocks)))
                    values.extend(blocks[written[group] :])
                    written[group] = len(blocks)
        return rows

    # -- steps ---------------------------------------------------------------------------------------------------

    def send(self, step: Step, padding: Padding = None) -> PackedStep:
        """Pack a step, copy it to the device and bring the state up to date; nothing is waited for."""
        staging = self._staging[self._next_staging]
        self._next_staging = (self._next_staging + 1) % len(self._staging)
        staging.wait()
        places: list[int] = []
        values: list[int] = []
        rows = self._locate(step.requests, places, values)
        layout = pack(staging.words, step, rows, padding, self._padding_row)
        self._transfer(staging, layout.end, places, values)
        return self._views(staging, layout, step.num_decodes)

    def _views(self, staging: Staging, layout: Layout, num_decodes: int) -> PackedStep:
        packed, size = self.packed, layout.num_seqs
        query_start, samples = self._one_each[: size + 1], None
        if layout.query_start is not None:
            query_start = packed[layout.query_start : layout.query_start + size + 1]
        if layout.samples is not None:
            samples = packed[layout.samples : layout.samples + 3 * layout.num_samples].view(3, -1)
        starts = packed[layout.starts : layout.starts + size]
        tokens = packed[layout.tokens : layout.tokens + layout.num_tokens]
        shared = None if layout.shared is None else packed[layout.shared : layout.shared + 1]
        counts = None if layout.counts is None else packed[layout.counts : layout.counts + 2]
        rows = packed[:size]
        return PackedStep(staging, layout, rows, starts, tokens, query_start, samples, num_decodes, shared, counts)

    def _transfer(self, staging: Staging, end: int, places: list[int], values: list[int]) -> None:
        """Send the first `end` words, and the changed entries behind them."""
        num_updates = len(places)
        at_values = aligned(end + num_updates)
        total = at_values + num_updates
        if total > len(staging.words):  # tables of thousands of new blocks: a transfer of their own
            self.packed[:end].copy_(staging.packed[:end], non_blocking=True)
            both = torch.tensor([places, values], dtype=torch.int32)
            if self.device.type == "cuda":
                both = both.pin_memory().to(self.device, non_blocking=True)
            ops.write_state(self.state, both[0], both[1])
            return
        if not num_updates:
            self.packed[:end].copy_(staging.packed[:end], non_blocking=True)
            return
        staging.words[end : end + num_updates] = places
        staging.words[at_values:total] = values
        self.packed[:total].copy_(staging.packed[:total], non_blocking=True)
        ops.write_state(self.state, self.packed[end : end + num_updates], self.packed[at_values:total])

    def prepare(self, packed: PackedStep, table_width: int | None = None) -> tuple[Tensor, Tensor, StepInputs]:
        """(input_ids, positions, step) of a packed step, made on the device; block tables of `table_width` entries."""
        layout = packed.layout
        num_seqs, num_tokens = layout.num_seqs, layout.num_tokens
        width = -(-layout.max_seq_len // self.block_size) if table_width is None else table_width
        everything = self.tensors
        out = ops.StepTensors(
            everything.input_ids[:num_tokens],
            everything.positions[:num_tokens],
            everything.seq_lens[:num_seqs],
            tuple(table[:num_seqs, :width] for table in everything.block_tables),
            tuple(slots[:num_tokens] for slots in everything.slot_mappings),
        )
        ops.prepare_inputs(
            packed.rows,
            packed.starts,
            packed.query_start,
            packed.tokens,
            self.state,
            self.block_size,
            layout.max_query_len,
            out,
        )
        metadata = tuple(
            AttentionMetadata(
                query_start=packed.query_start,
                seq_lens=out.seq_lens,
                block_table=table,
                slot_mapping=slots,
                max_query_len=layout.max_query_len,
                max_seq_len=layout.max_seq_len,
                num_decodes=packed.num_decodes,
                query_lens_host=layout.query_lens,
                seq_lens_host=layout.seq_lens,
                num_shared=packed.num_shared,
                counts=packed.counts,
                max_prompts=layout.max_prompts,
            )
            for table, slots in zip(out.block_tables, out.slot_mappings, strict=True)
        )
        return out.input_ids, out.positions, StepInputs(metadata)

    def decode_of(self, shape: DecodeShape) -> PackedStep:
        """The views of a step of decodes of any length that fits into `shape`: what a graph reads."""
        layout = shape.layout()
        layout.max_seq_len = self.max_model_len
        return self._views(self._staging[0], layout, shape.num_requests)

    def prompts_of(self, shape: PromptShape) -> PackedStep:
        """The same of any step that fits into `shape`. No length is on the host, nor how many requests decode."""
        layout = shape.layout()
        layout.max_query_len, layout.max_seq_len = shape.num_tokens, self.max_model_len
        return self._views(self._staging[0], layout, 0)

    def write_padding(self) -> None:
        """Change entries of the row that padding points to, as steps change those of requests."""
        places = torch.arange(4, dtype=torch.int32, device=self.device) + self.state.offsets[2]
        places += self._padding_row * self._num_blocks
        ops.write_state(self.state, places[: self._num_blocks], torch.zeros_like(places[: self._num_blocks]))

    def send_padding(self, padding: PackedStep) -> None:
        """Fill these views with requests that compute nothing, for warming up and for capturing."""
        padding.rows.fill_(self._padding_row)
        padding.tokens.zero_()
        if padding.layout.query_start is None:
            padding.starts.fill_(-1)
            if padding.num_shared is not None:
                padding.num_shared.zero_()
            return
        padding.starts.zero_()
        padding.starts[-1:].fill_(-padding.layout.num_tokens)
        if padding.counts is not None:
            padding.counts.zero_()
        padding.query_start.zero_()
        padding.query_start[-1:].fill_(padding.layout.num_tokens)


def _sampling_words(row: SamplingRow) -> list[int]:
    """A request's line of `ops.RequestState.sampling`."""
    params = row.params
    temperature = 0.0 if row.is_greedy else params.temperature
    floats = np.array([temperature, params.top_p, params.min_p], np.float32).view(np.int32).tolist()
    seed = np.array([row.seed & 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.int32).tolist()
    return [*floats, max(0, params.top_k), *seed, row.num_prompt_tokens, 0]
