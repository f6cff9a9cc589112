"""A scheduler step as one vector of int32: the order of its sections, and how they are filled on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.step import ScheduledRequest, Step

FEWEST_PROMPTS = 32  # that a step may hold which is padded, and one more for every so many of its tokens
PROMPT_TOKENS = 16
_ALIGN = 4  # sections begin at 16 bytes, so that kernels are compiled for one alignment only

Words = NDArray[Any]  # int32


@dataclass(slots=True)
class Layout:
    """Where the sections of a step of `num_seqs` requests (padding included) and `num_tokens` tokens begin.

    The rows are at 0. `query_start` is None where every request has one token, and `samples` (int32 [3, num_samples]:
    row of the hidden states, row of the state, sequence length) where each of them samples as well. `shared` is where
    the number of tokens stands that all requests share, `counts` where the numbers of decodes and of requests do; None
    where the device need not know them.
    """

    num_seqs: int
    num_tokens: int
    starts: int
    tokens: int
    end: int
    query_start: int | None = None
    shared: int | None = None
    counts: int | None = None
    max_prompts: int = 0  # of a step with `counts`
    samples: int | None = None
    num_samples: int = 0
    max_query_len: int = 1
    max_seq_len: int = 0
    query_lens: list[int] | None = None  # on the host, where not all requests decode
    seq_lens: list[int] | None = None

    @classmethod
    def of(cls, num_seqs: int, num_tokens: int) -> Layout:
        """Rows, starts and tokens: all that a step of decodes has."""
        starts = aligned(num_seqs)
        return cls(num_seqs, num_tokens, starts, 2 * starts, aligned(2 * starts + num_tokens))


class DecodeShape(NamedTuple):
    """What a step of decodes may be padded to: a number of requests, which have `num_shared` leading tokens in common.

    0 stands for no such tokens, or too few for kernels of their own.
    """

    num_requests: int
    num_shared: int = 0

    def layout(self) -> Layout:
        """Where the sections are; `shared` is one of them where there are such tokens."""
        layout = Layout.of(self.num_requests, self.num_requests)
        if self.num_shared:
            layout.shared = layout.end
            layout.end = aligned(layout.end + 1)
        return layout


class Staging:
    """Host memory of one step: what is sent and what comes back. Not used again before `done` has passed."""

    def __init__(self, num_words: int, max_num_seqs: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.packed = torch.zeros(num_words, dtype=torch.int32, pin_memory=pinned)
        self.words: Words = self.packed.numpy()
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=pinned)
        self.done = torch.cuda.Event() if pinned else None

    def record(self) -> None:
        """Mark the end of the work that reads or writes this memory."""
        if self.done is not None:
            self.done.record()

    def wait(self) -> None:
        """Wait for that work."""
        if self.done is not None:
            self.done.synchronize()


def words_needed(max_num_seqs: int, max_num_tokens: int) -> int:
    """Room for the sections of any step, without changes of the state; a padded one has a request more."""
    return 6 * aligned(max_num_seqs + 2) + aligned(max_num_tokens) + aligned(2)


class PromptShape(NamedTuple):
    """What a step that is not all decodes may be padded to: `max_requests` and one more, which has the padded tokens.

    The requests between compute nothing. The last begins as far before 0 as it has tokens: its length is 0, and no
    token of it has a slot.
    """

    max_requests: int
    num_tokens: int

    @property
    def max_prompts(self) -> int:
        """Requests at most that do not decode: attention has programs for the last tile of each."""
        return min(self.max_requests, max(FEWEST_PROMPTS, self.num_tokens // PROMPT_TOKENS))

    def layout(self) -> Layout:
        """Where the sections are, whatever the step."""
        layout = _mixed_layout(self.max_requests + 1, self.num_tokens)
        layout.counts, layout.max_prompts = layout.end, self.max_prompts
        layout.end = aligned(layout.end + 2)
        return layout


def _mixed_layout(num_seqs: int, num_tokens: int) -> Layout:
    layout = Layout.of(num_seqs, num_tokens)
    layout.query_start = layout.end
    layout.end = aligned(layout.end + num_seqs + 1)
    return layout


Padding = DecodeShape | PromptShape | None
"""What a step is padded to: the one where all requests decode, the other where they do not, or nothing."""


def pack(words: Words, step: Step, rows: list[int], padding: Padding, padding_row: int) -> Layout:
    """Fill the sections of a step whose requests have these rows of the state."""
    items = step.requests
    starts = [item.start for item in items]
    if step.num_decodes == len(items):
        assert not isinstance(padding, PromptShape)
        layout = _pack_decodes(words, items, rows, starts, padding or DecodeShape(len(items)), padding_row)
        if all(item.sample for item in items):
            return layout
    else:
        assert not isinstance(padding, DecodeShape)
        layout = _pack_mixed(words, step, rows, starts, padding)
        if padding is not None:
            _pad_mixed(words, layout, step, padding_row)
    samples = _samples(items, rows, starts, layout.query_lens)
    layout.samples, layout.num_samples = layout.end, samples.shape[1]
    words[layout.end : layout.end + samples.size] = samples.ravel()
    layout.end = aligned(layout.end + samples.size)
    return layout


def _pack_decodes(
    words: Words,
    items: Sequence[ScheduledRequest],
    rows: list[int],
    starts: list[int],
    shape: DecodeShape,
    padding_row: int,
) -> Layout:
    layout, count, size = shape.layout(), len(items), shape.num_requests
    layout.max_seq_len = max(starts) + 1
    words[:count] = rows
    words[layout.starts : layout.starts + count] = starts
    words[layout.tokens : layout.tokens + count] = [item.token_ids[0] for item in items]
    if size > count:
        words[count:size] = padding_row
        words[layout.starts + count : layout.starts + size] = -1
        words[layout.tokens + count : layout.tokens + size] = 0
    if layout.shared is not None:
        words[layout.shared] = shape.num_shared
    return layout


def _pack_mixed(words: Words, step: Step, rows: list[int], starts: list[int], shape: PromptShape | None) -> Layout:
    items, count, num_tokens = step.requests, len(step.requests), step.num_tokens
    layout = _mixed_layout(count, num_tokens) if shape is None else shape.layout()
    words[:count] = rows
    words[layout.starts : layout.starts + count] = starts
    tokens = chain.from_iterable(item.token_ids for item in items)
    words[layout.tokens : layout.tokens + num_tokens] = np.fromiter(tokens, np.int32, num_tokens)
    layout.query_lens = [item.num_tokens for item in items]
    layout.seq_lens = [start + length for start, length in zip(starts, layout.query_lens, strict=True)]
    layout.max_query_len, layout.max_seq_len = max(layout.query_lens), max(layout.seq_lens)
    at = layout.query_start
    assert at is not None
    words[at] = 0
    np.cumsum(layout.query_lens, out=words[at + 1 : at + 1 + count])
    return layout


def _pad_mixed(words: Words, layout: Layout, step: Step, padding_row: int) -> None:
    """Add what `PromptShape` says, and what the host knows of a step without a shape."""
    count, num_tokens = len(step.requests), step.num_tokens
    size, at, num_padded = layout.num_seqs, layout.query_start, layout.num_tokens - num_tokens
    assert at is not None and layout.counts is not None and count < size and num_padded >= 0
    words[layout.counts : layout.counts + 2] = step.num_decodes, count
    words[count:size] = padding_row
    words[layout.starts + count : layout.starts + size - 1] = 0
    words[layout.starts + size - 1] = -num_padded
    words[layout.tokens + num_tokens : layout.tokens + layout.num_tokens] = 0
    words[at + count + 1 : at + size] = num_tokens
    words[at + size] = layout.num_tokens


def _samples(
    items: Sequence[ScheduledRequest], rows: list[int], starts: list[int], query_lens: list[int] | None
) -> Words:
    """The section `samples` of `Layout`, for the requests that sample."""
    counts = np.array(query_lens if query_lens is not None else [1] * len(items), np.int32)
    table = np.stack((np.cumsum(counts, dtype=np.int32) - 1, np.array(rows, np.int32), np.array(starts) + counts))
    return table[:, [item.sample for item in items]].astype(np.int32)


def aligned(place: int) -> int:
    """The next place at which a section may begin."""
    return -(-place // _ALIGN) * _ALIGN
