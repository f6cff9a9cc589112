"""CUDA graphs of small steps that hold prompts, whose launch costs the host more than the device needs to compute them.

A step runs in the smallest shape that holds it, and its requests, decodes among them, all take the attention kernel of
prompts: its grid follows from numbers of tokens and of requests alone. A graph ends with the hidden states, padded rows
of which hold anything; the few rows that sample are gathered and sampled by single calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.core.step import Step
from octavo.engine.device_state import DeviceState
from octavo.engine.graphs import Recorder, waiting_is_an_error
from octavo.engine.packing import PromptShape
from octavo.models.base import CausalLM

logger = logging.getLogger(__name__)

NUM_TOKENS = (16, 32, 64, 128, 256, 512)
FEW_REQUESTS = 16
MAX_DECODE_CONTEXT = 8192  # a prompt's kernel walks the context of a decode in one program: 0.1 ms a layer for so many


def prompt_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[PromptShape]:
    """Shapes that get a graph, in the order in which a step looks for its own."""
    requests = sorted({min(FEW_REQUESTS, max_num_seqs), max_num_seqs})
    shapes = [PromptShape(most, tokens) for tokens in NUM_TOKENS for most in requests]
    return [
        shape
        for shape in shapes
        if shape.num_tokens <= max_num_batched_tokens
        and (shape.max_requests <= FEW_REQUESTS or shape.num_tokens > FEW_REQUESTS)
    ]


def fitting_shape(shapes: Sequence[PromptShape], step: Step) -> PromptShape | None:
    """The first of these that holds the step, or None where it had better be launched by single calls."""
    if not shapes or step.num_tokens > shapes[-1].num_tokens:
        return None
    if any(item.start >= MAX_DECODE_CONTEXT for item in step.requests[: step.num_decodes]):
        return None
    count = len(step.requests)
    return next((s for s in shapes if step.num_tokens <= s.num_tokens and count <= s.max_requests), None)


class PromptGraphs:
    """Captures and holds the graphs.

    `failure` says why nothing could be captured, if so; such steps run without graphs then.
    """

    def __init__(self, model: CausalLM, state: DeviceState, recorder: Recorder) -> None:
        self._model, self._state, self._recorder = model, state, recorder
        self._graphs: dict[PromptShape, tuple[Any, Tensor]] = {}
        self._shapes: list[PromptShape] = []
        self.failure: str | None = None

    def capture(self, shapes: Sequence[PromptShape]) -> None:
        """Capture these shapes besides those that were before, the largest first."""
        begin = time.perf_counter()
        for shape in sorted(shapes, key=_size, reverse=True):
            try:
                with waiting_is_an_error():
                    self.warm_up([shape])
                with self._recorder.recording() as graph:
                    hidden = self._body(shape)
                self._graphs[shape] = graph, hidden
            except Exception as error:  # as for decodes
                self._graphs.clear()
                self.failure = f"{type(error).__name__}: {error}"
                logger.warning("small prompts run without CUDA graphs, since they cannot be captured: %s", error)
                break
        self._shapes = sorted(self._graphs, key=_size)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what warming up took
        logger.info("captured %s graphs of small prompts in %.1f s", len(self._graphs), time.perf_counter() - begin)

    def warm_up(self, shapes: Sequence[PromptShape]) -> None:
        """Launch what the graphs of these shapes would hold, on padding, without capturing it."""
        for shape in shapes:
            self._state.send_padding(self._state.prompts_of(shape))
            with self._recorder.rehearsing():
                self._body(shape)

    def shape_for(self, step: Step) -> PromptShape | None:
        """The captured shape that a step is to be packed for, or None."""
        return fitting_shape(self._shapes, step)

    def run_body(self, shape: PromptShape) -> Tensor:
        """Compute the step that was packed for `shape`; returns the hidden rows [shape.num_tokens, H]."""
        graph, hidden = self._graphs[shape]
        graph.replay()
        return hidden

    def _body(self, shape: PromptShape) -> Tensor:
        width = self._state.tensors.block_tables[0].shape[1]
        packed = self._state.prompts_of(shape)
        return self._model(*self._state.prepare(packed, width))  # type: ignore[no-any-return]


def _size(shape: PromptShape) -> tuple[int, int]:
    return shape.num_tokens, shape.max_requests
