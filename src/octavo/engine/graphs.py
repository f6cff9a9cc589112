"""CUDA graphs of decode steps: one launch in place of hundreds.

A graph is captured for each of a list of batch sizes, and a step runs in the smallest that holds it; the rest of its
rows is padding (length 0, slot -1). Some sizes have another graph for requests whose contexts begin alike. The body
ends with the hidden states and the head with tokens, so that a step whose sampling needs the host uses the body alone.
All graphs share one memory pool and are captured from the largest to the smallest, so that the pool is as large as the
largest needs.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.engine.device_state import DeviceState, PackedStep
from octavo.engine.packing import DecodeShape
from octavo.engine.shared_prefix import MIN_REQUESTS
from octavo.models.base import CausalLM

logger = logging.getLogger(__name__)

Head = Callable[[Tensor, Tensor, Tensor], Any]
"""Samples from hidden rows [R, H], given the rows of the state and the sequence lengths, both int32 [R]."""


def decode_shapes(max_num_seqs: int, can_share: bool) -> list[DecodeShape]:
    """What gets a graph: batches of 1, 2, 4, then steps of 8, 16 and 32, up to and including `max_num_seqs`.

    Products take rows in tiles of 64 or 128 from some size on, and padding has no context to attend to, so that finer
    steps would save next to nothing. With `can_share`, every 32 requests another for those whose contexts begin alike.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 1, 32)]
    sizes = [size for size in sizes if size < max_num_seqs] + [max_num_seqs]
    shapes = [DecodeShape(size) for size in sizes]
    if can_share and max_num_seqs >= MIN_REQUESTS:
        sharing = [size for size in (MIN_REQUESTS, *range(32, max_num_seqs, 32)) if size < max_num_seqs]
        shapes += [DecodeShape(size, num_shared=1) for size in (*sharing, max_num_seqs)]
    return shapes


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


class DecodeGraphs:
    """Captures and holds the graphs.

    `failure` says why nothing could be captured, if so; steps run without graphs then.
    """

    def __init__(self, model: CausalLM, state: DeviceState, recorder: Recorder) -> None:
        self._model, self._state, self._recorder = model, state, recorder
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}  # by batch size, and whether contexts begin alike
        self._sizes: dict[bool, list[int]] = {False: [], True: []}
        self.failure: str | None = None

    def capture(self, shapes: Sequence[DecodeShape], heads: Mapping[bool, Head]) -> None:
        """Capture these shapes; `heads` maps "all rows are greedy" to what samples then.

        A model that waits for the device, or allocates by its data, cannot be captured.
        """
        begin = time.perf_counter()
        for shape in sorted(shapes, reverse=True):
            try:
                with waiting_is_an_error():
                    self._warm_up(shape, heads)
                self._graphs[_key(shape)] = self._capture(shape, heads)
            except Exception as error:  # whatever a model's own code raises where it may not wait
                self._graphs.clear()
                self.failure = f"{type(error).__name__}: {error}"
                logger.warning("decode steps run without CUDA graphs, since the model cannot be captured: %s", error)
                break
        for shares in self._sizes:
            self._sizes[shares] = sorted(size for size, kind in self._graphs if kind == shares)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what warming up took
        logger.info("captured %s decode graphs in %.1f s", len(self._graphs), time.perf_counter() - begin)

    def warm_up(self, shapes: Sequence[DecodeShape], heads: Mapping[bool, Head]) -> None:
        """Launch what the graphs of these shapes would hold, without capturing it."""
        for shape in shapes:
            self._warm_up(shape, heads)

    def padded_shape(self, num_requests: int, num_shared: int = 0) -> DecodeShape | None:
        """The smallest captured shape that holds so many requests, or None."""
        sizes = self._sizes[num_shared > 0]
        place = bisect_left(sizes, num_requests)
        if place < len(sizes):
            return DecodeShape(sizes[place], num_shared)
        return self.padded_shape(num_requests) if num_shared else None

    def run_body(self, shape: DecodeShape) -> Tensor:
        """Compute the step that was packed for `shape`; returns the hidden rows [num_requests, H]."""
        graph = self._graphs[_key(shape)]
        graph.body.replay()
        return graph.hidden

    def run_head(self, shape: DecodeShape, is_greedy: bool) -> None:
        """Sample from what `run_body` left."""
        self._graphs[_key(shape)].heads[is_greedy].replay()

    def _warm_up(self, shape: DecodeShape, heads: Mapping[bool, Head]) -> None:
        """Run everything once outside of a graph: kernels are compiled and loaded, and workspaces allocated."""
        packed = self._state.decode_of(shape)
        self._state.send_padding(packed)
        with self._recorder.rehearsing():
            hidden = self._body(packed)
            for head in heads.values():
                head(hidden, packed.rows, self._state.tensors.seq_lens[: shape.num_requests])

    def _body(self, packed: PackedStep) -> Tensor:
        width = self._state.tensors.block_tables[0].shape[1]
        return self._model(*self._state.prepare(packed, width))  # type: ignore[no-any-return]

    def _capture(self, shape: DecodeShape, heads: Mapping[bool, Head]) -> DecodeGraph:
        packed = self._state.decode_of(shape)
        lengths = self._state.tensors.seq_lens[: shape.num_requests]
        with self._recorder.recording() as body:
            hidden = self._body(packed)
        captured = {}
        for kind, head in heads.items():
            with self._recorder.recording() as captured[kind]:
                head(hidden, packed.rows, lengths)
        return DecodeGraph(body, hidden, captured)


def _key(shape: DecodeShape) -> tuple[int, bool]:
    return shape.num_requests, shape.num_shared > 0


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Operations that wait for the device raise inside."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
