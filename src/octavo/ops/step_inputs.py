"""What a step needs before and after the model, on the device that keeps the requests' state.

`RequestState` has a row a request: its newest token, its sampling parameters and its block tables. A step sends numbers
of its requests in one copy; the operations here make the model's inputs of them, and keep what was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.dispatch import Candidate, Operation
from octavo.ops.triton import runtime

NUM_SAMPLING_WORDS = 8
"""Columns of `RequestState.sampling`: temperature, top_p, min_p (float32 bits), top_k, the seed's low and high half,
the prompt's length, and one that is not used (32 bytes a row)."""


@dataclass(frozen=True)
class RequestState:
    """State by request row; `tokens`, `sampling` and `tables` are views of `flat`, so that one write changes them all.

    flat: int32 [N]. tokens: int32 [rows], the newest token. sampling: int32 [rows, NUM_SAMPLING_WORDS]. tables: int32
    [rows, blocks] a cache group. `offsets` are where tokens, sampling and each table begin in `flat`.
    """

    flat: Tensor
    tokens: Tensor
    sampling: Tensor
    tables: tuple[Tensor, ...]
    offsets: tuple[int, ...]

    @classmethod
    def allocate(cls, num_rows: int, num_blocks: int, num_groups: int, device: torch.device) -> RequestState:
        """Zeroed state for `num_rows` requests with tables of `num_blocks` entries."""
        sizes = [num_rows, num_rows * NUM_SAMPLING_WORDS] + [num_rows * num_blocks] * num_groups
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        tokens, sampling, *tables = (flat[o : o + n].view(num_rows, -1) for o, n in zip(offsets, sizes, strict=True))
        return cls(flat, tokens[:, 0], sampling, tuple(tables), tuple(offsets))


@dataclass(frozen=True)
class StepTensors:
    """Where `prepare_inputs` writes: S requests, T tokens, one block table and slot mapping a cache group.

    input_ids, positions: int64 [T]; seq_lens: int32 [S]; block_tables: int32 [S, blocks]; slot_mappings: int64 [T].
    """

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mappings: tuple[Tensor, ...]


def write_state(state: RequestState, places: Tensor, values: Tensor) -> None:
    """Set `state.flat[places] = values`; both int32 [U], places without repeats."""
    _WRITE_STATE(places, values, state)


def prepare_inputs(
    rows: Tensor,
    starts: Tensor,
    query_start: Tensor,
    tokens: Tensor,
    state: RequestState,
    block_size: int,
    max_query_len: int,
    out: StepTensors,
) -> None:
    """Lay out the inputs of a step from int32 vectors: rows, starts [S], query_start [S + 1] and tokens [T].

    Request s has the tokens query_start[s]:query_start[s + 1], at positions from starts[s] on. A token of -1 is the
    newest one of its row. A request of n tokens that starts at -n is padding: its length is 0 and its slots are -1.
    """
    _PREPARE_INPUTS(rows, starts, query_start, tokens, state, block_size, max_query_len, out)


def sampling_inputs(state: RequestState, rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """The parameters of the rows that sample, for `sample_tokens`; rows and ends int32 [R].

    `ends` are sequence lengths, the token to be sampled left out. Returns temperature float32, top_k int32, top_p and
    min_p float32, seed and position int64, all [R]; position counts the tokens sampled before.
    """
    return _SAMPLING_INPUTS(rows, ends, state)  # type: ignore[no-any-return]


def keep_tokens(state: RequestState, rows: Tensor, sampled: Tensor, out: Tensor) -> None:
    """Make `sampled` int64 [R] the newest tokens of `rows` int32 [R], and copy them to `out` int64 [R]."""
    _KEEP_TOKENS(rows, sampled, state, out)


def _write_state(places: Tensor, values: Tensor, state: RequestState) -> None:
    state.flat.index_put_((places,), values)


def _prepare_inputs(
    rows: Tensor,
    starts: Tensor,
    query_start: Tensor,
    tokens: Tensor,
    state: RequestState,
    block_size: int,
    max_query_len: int,
    out: StepTensors,
) -> None:
    counts = query_start[1:] - query_start[:-1]
    out.seq_lens.copy_(starts + counts)
    order = torch.arange(len(rows), device=rows.device)
    owner = torch.repeat_interleave(order, counts, output_size=len(tokens))
    positions = torch.arange(len(tokens), device=rows.device) - query_start[owner] + starts[owner]
    owner_rows = rows[owner]
    is_padding = positions < 0
    positions = positions.clamp(min=0)
    out.positions.copy_(positions)
    out.input_ids.copy_(torch.where(tokens < 0, state.tokens[owner_rows], tokens).clamp(min=0))
    for table, block_table, slots in zip(state.tables, out.block_tables, out.slot_mappings, strict=True):
        block_table.copy_(table[rows, : block_table.shape[1]])
        blocks = table[owner_rows, positions // block_size].long()
        slots.copy_(torch.where(is_padding, -1, blocks * block_size + positions % block_size))


def _sampling_inputs(rows: Tensor, ends: Tensor, state: RequestState) -> tuple[Tensor, ...]:
    words = state.sampling[rows].T.contiguous()
    temperature, top_p, min_p = words[:3].view(torch.float32)
    seed = (words[4].long() & 0xFFFFFFFF) | (words[5].long() << 32)
    return temperature, words[3], top_p, min_p, seed, (ends - words[6]).long()


def _keep_tokens(rows: Tensor, sampled: Tensor, state: RequestState, out: Tensor) -> None:
    state.tokens.index_put_((rows,), sampled.int())
    out.copy_(sampled)


def _operation(name: str, reference: object) -> Operation:
    kernel = Candidate("triton", runtime.lazy("inputs", name), ("cuda",), unavailable=runtime.unavailable())
    return Operation(name, kernel, Candidate("torch", reference, note="the reference"))  # type: ignore[arg-type]


_WRITE_STATE = _operation("write_state", _write_state)
_PREPARE_INPUTS = _operation("prepare_inputs", _prepare_inputs)
_SAMPLING_INPUTS = _operation("sampling_inputs", _sampling_inputs)
_KEEP_TOKENS = _operation("keep_tokens", _keep_tokens)
