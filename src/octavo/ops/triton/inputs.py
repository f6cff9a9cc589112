"""The small operations around the model in one kernel each: their torch versions are dozens of launches a step.

Numbers that differ from step to step are not specialized on, so that nothing is compiled once requests run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.step_inputs import NUM_SAMPLING_WORDS, RequestState, StepTensors

PART = 1024  # tokens, and table entries, of one request that a program lays out
ROWS = 128  # rows a program of the sampling kernels


@triton.jit(do_not_specialize=["U"])
def _write_state(places, values, flat, U, PART: tl.constexpr):
    u = tl.program_id(0) * PART + tl.arange(0, PART)
    mask = u < U
    tl.store(flat + tl.load(places + u, mask, 0), tl.load(values + u, mask, 0), mask)


def write_state(places: Tensor, values: Tensor, state: RequestState) -> None:
    """As `octavo.ops.write_state`."""
    count = len(places)
    _write_state[(triton.cdiv(count, PART),)](places, values, state.flat, count, PART=PART)


@triton.jit(do_not_specialize=["num_blocks", "table_stride", "block_table_stride"])
def _prepare_inputs(
    rows,
    starts,
    query_start,
    tokens,
    newest,
    table,
    input_ids,
    positions,
    seq_lens,
    block_table,
    slot_mapping,
    num_blocks,
    table_stride,
    block_table_stride,
    BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr,
):
    s, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + s)
    start = tl.load(starts + s)
    first = tl.load(query_start + s)
    count = tl.load(query_start + s + 1) - first
    length = start + count
    if part == 0:
        tl.store(seq_lens + s, length)
    offsets = part * PART + tl.arange(0, PART)
    table += row.to(tl.int64) * table_stride
    is_used = offsets < tl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, num_blocks)
    tl.store(block_table + s.to(tl.int64) * block_table_stride + offsets, tl.load(table + offsets, is_used), is_used)
    is_token = offsets < count
    position = start + offsets
    is_real = position >= 0
    token = tl.load(tokens + first + offsets, is_token, 0)
    token = tl.where(token < 0, tl.load(newest + row), token)
    block = tl.load(table + position // BLOCK_SIZE, is_token & is_real, 0).to(tl.int64)
    slot = tl.where(is_real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(input_ids + first + offsets, tl.maximum(token, 0).to(tl.int64), is_token)
    tl.store(positions + first + offsets, tl.maximum(position, 0).to(tl.int64), is_token)
    tl.store(slot_mapping + first + offsets, slot, is_token)


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
    """As `octavo.ops.prepare_inputs`; table entries beyond a request's length are left as they are."""
    for table, block_table, slots in zip(state.tables, out.block_tables, out.slot_mappings, strict=True):
        num_blocks = block_table.shape[1]
        _prepare_inputs[len(rows), triton.cdiv(max(max_query_len, num_blocks), PART)](
            rows,
            starts,
            query_start,
            tokens,
            state.tokens,
            table,
            out.input_ids,
            out.positions,
            out.seq_lens,
            block_table,
            slots,
            num_blocks,
            table.stride(0),
            block_table.stride(0),
            BLOCK_SIZE=block_size,
            PART=PART,
        )


@triton.jit(do_not_specialize=["R"])
def _sampling_inputs(
    rows, ends, words, temperature, top_k, top_p, min_p, seed, position, R, WORDS: tl.constexpr, ROWS: tl.constexpr
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = r < R
    words += tl.load(rows + r, mask, 0) * WORDS
    tl.store(temperature + r, tl.load(words, mask, 0).to(tl.float32, bitcast=True), mask)
    tl.store(top_p + r, tl.load(words + 1, mask, 0).to(tl.float32, bitcast=True), mask)
    tl.store(min_p + r, tl.load(words + 2, mask, 0).to(tl.float32, bitcast=True), mask)
    tl.store(top_k + r, tl.load(words + 3, mask, 0), mask)
    low = tl.load(words + 4, mask, 0).to(tl.int64) & 0xFFFFFFFF
    tl.store(seed + r, low | (tl.load(words + 5, mask, 0).to(tl.int64) << 32), mask)
    tl.store(position + r, (tl.load(ends + r, mask, 0) - tl.load(words + 6, mask, 0)).to(tl.int64), mask)


def sampling_inputs(rows: Tensor, ends: Tensor, state: RequestState) -> tuple[Tensor, ...]:
    """As `octavo.ops.sampling_inputs`."""
    count, device = len(rows), rows.device
    temperature, top_p, min_p = torch.empty((3, count), dtype=torch.float32, device=device)
    seed, position = torch.empty((2, count), dtype=torch.int64, device=device)
    top_k = torch.empty(count, dtype=torch.int32, device=device)
    _sampling_inputs[(triton.cdiv(count, ROWS),)](
        rows,
        ends,
        state.sampling,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        position,
        count,
        WORDS=NUM_SAMPLING_WORDS,
        ROWS=ROWS,
    )
    return temperature, top_k, top_p, min_p, seed, position


@triton.jit(do_not_specialize=["R"])
def _keep_tokens(rows, sampled, newest, out, R, ROWS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = r < R
    token = tl.load(sampled + r, mask, 0)
    tl.store(newest + tl.load(rows + r, mask, 0), token.to(tl.int32), mask)
    tl.store(out + r, token, mask)


def keep_tokens(rows: Tensor, sampled: Tensor, state: RequestState, out: Tensor) -> None:
    """As `octavo.ops.keep_tokens`."""
    count = len(rows)
    _keep_tokens[(triton.cdiv(count, ROWS),)](rows, sampled, state.tokens, out, count, ROWS=ROWS)
