"""CUDA graphs of decode steps: one launch in place of hundreds.

A graph is captured for each of a list of batch sizes, and a step runs in the smallest that holds it; the rest of its
rows is padding (length 0, slot -1). The body ends with the hidden states and the head with tokens, so that a step whose
sampling needs the host uses the body alone. All graphs share one memory pool and are captured from the largest to the
smallest, so that the pool is as large as the largest needs.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.engine.device_state import DeviceState
from octavo.models.base import CausalLM

logger = logging.getLogger(__name__)

Head = Callable[[Tensor, Tensor, Tensor], Any]
"""Samples from hidden rows [R, H], given the rows of the state and the sequence lengths, both int32 [R]."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, then steps of 8, 16 and 32, up to and including `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_num_seqs + 1, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True)
class DecodeGraph:
    """The graphs of one batch size. `hidden` [size, H] is what the body leaves; `heads` are by kind of sampling."""

    body: Any
    hidden: Tensor
    heads: dict[bool, Any]


class Recorder:
    """Records graphs that share a memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # one for all: cuBLAS keeps a workspace for every stream that it sees

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """What is launched inside runs on the stream of the recordings."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def recording(self) -> Iterator[Any]:
        """A graph of what is launched inside. (`torch.cuda.graph` would empty torch's cache of memory each time.)"""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield graph
            except BaseException:
                with suppress(RuntimeError):  # says only that the first error has made the capture invalid
                    graph.capture_end()
                raise
            graph.capture_end()

    def device_seconds(self, graph: Any) -> float:
        """How long the device takes for a graph; waits for it."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the first time takes longer: it is uploaded
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class DecodeGraphs:
    """Captures and holds the graphs.

    `failure` says why nothing could be captured, if so; steps run without graphs then.
    """

    def __init__(self, model: CausalLM, state: DeviceState, recorder: Recorder) -> None:
        self._model, self._state, self._recorder = model, state, recorder
        self._graphs: dict[int, DecodeGraph] = {}
        self._sizes: list[int] = []
        self.failure: str | None = None

    def capture(self, sizes: Sequence[int], heads: dict[bool, Head]) -> None:
        """Capture these batch sizes; `heads` maps "all rows are greedy" to what samples then.

        A model that waits for the device, or allocates by its data, cannot be captured.
        """
        begin = time.perf_counter()
        for size in sorted(sizes, reverse=True):
            try:
                with waiting_is_an_error():
                    self._warm_up(size, heads)
                self._graphs[size] = self._capture(size, heads)
            except Exception as error:  # whatever a model's own code raises where it may not wait
                self._graphs.clear()
                self.failure = f"{type(error).__name__}: {error}"
                logger.warning("decode steps run without CUDA graphs, since the model cannot be captured: %s", error)
                break
        self._sizes = sorted(self._graphs)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what warming up took
        logger.info("captured %s decode graphs in %.1f s", len(self._graphs), time.perf_counter() - begin)

    def warm_up(self, sizes: Sequence[int], heads: dict[bool, Head]) -> None:
        """Launch what the graphs of these batch sizes would hold, without capturing it."""
        for size in sizes:
            self._warm_up(size, heads)

    def padded_size(self, num_seqs: int) -> int | None:
        """The smallest captured batch size that holds `num_seqs` requests, or None."""
        place = bisect_left(self._sizes, num_seqs)
        return self._sizes[place] if place < len(self._sizes) else None

    def run_body(self, size: int) -> Tensor:
        """Compute the step that was packed for `size`; returns the hidden rows [size, H]."""
        graph = self._graphs[size]
        graph.body.replay()
        return graph.hidden

    def run_head(self, size: int, is_greedy: bool) -> None:
        """Sample from what `run_body` left."""
        self._graphs[size].heads[is_greedy].replay()

    def _warm_up(self, size: int, heads: dict[bool, Head]) -> None:
        """Run everything once outside of a graph: kernels are compiled and loaded, and workspaces allocated."""
        packed = self._state.decode_of(size)
        self._state.send_padding(packed)
        with self._recorder.rehearsing():
            hidden = self._body(size)
            for head in heads.values():
                head(hidden, packed.rows, self._state.tensors.seq_lens[:size])

    def _body(self, size: int) -> Tensor:
        packed = self._state.decode_of(size)
        width = self._state.tensors.block_tables[0].shape[1]
        return self._model(*self._state.prepare(packed, width))  # type: ignore[no-any-return]

    def _capture(self, size: int, heads: dict[bool, Head]) -> DecodeGraph:
        packed = self._state.decode_of(size)
        lengths = self._state.tensors.seq_lens[:size]
        with self._recorder.recording() as body:
            hidden = self._body(size)
        captured = {}
        for kind, head in heads.items():
            with self._recorder.recording() as captured[kind]:
                head(hidden, packed.rows, lengths)
        return DecodeGraph(body, hidden, captured)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Operations that wait for the device raise inside."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
