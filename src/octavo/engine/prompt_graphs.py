"""CUDA graphs of steps that hold prompts, where launching them costs the host more than computing them the device.

A step runs in the smallest shape that holds it. How many of its requests decode is on the device alone
(`AttentionMetadata.counts`): they have an attention kernel of their own there, and the grids of both kernels follow
from numbers of tokens, of requests and of prompts. A graph ends with the hidden states, padded rows of which hold
anything; the few rows that sample are gathered and sampled by single calls.

Up to which size that pays depends on the model: 32 layers are some 300 launches, 15 to 18 ms, which an 8B model needs
for 600 tokens and a model of a tenth for 5,000. `worthwhile_tokens` says so from its sizes rather than from a clock, so
that every start has the same graphs, and with them the same last bits. Shapes reach beyond what a server lets a step
take (`core/prefill_cap.py`): 512 tokens of prompts and some decodes are the step of a server with little backlog, so
the sizes lie close together behind 512. When all rows took the prompts' kernel, such steps were better launched by
single calls: at 48 requests a second an 8B model's streams had a median of 12.5 ms a token without graphs of 576 and
640 tokens, and 16.2 ms with them (one run each, on machines some 3 % apart).
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
from octavo.layers.layer import weights_of
from octavo.models.base import CausalLM
from octavo.ops import PackedWeight
from octavo.ops.triton.runtime import num_multiprocessors

logger = logging.getLogger(__name__)

NUM_TOKENS = (16, 32, 64, 128, 256, 512, *range(544, 705, 32), 768, 1024, 1536, 2304)
NUM_REQUESTS = 128  # and the most: a decode that is not there costs a program a key head that returns at once
MAX_PROMPT_PAIRS = 1 << 21  # of a prompt's new tokens and its context: from there on attention has faster single calls
LAUNCH_SECONDS = 0.52e-3  # of the host, for the single calls of a layer: 15 to 18 ms for 32 of them
OPERATIONS_A_SECOND = 600e12 / 132  # of a multiprocessor in bf16, in products of so many rows


def prompt_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[PromptShape]:
    """Shapes that may get a graph, in the order in which a step looks for its own."""
    shapes = []
    for tokens in NUM_TOKENS:
        if tokens > max_num_batched_tokens:
            break
        most = min(tokens, max_num_seqs)  # a step of so many tokens has no more requests
        shapes += [PromptShape(count, tokens) for count in sorted({min(most, NUM_REQUESTS), most})]
    return shapes


def worthwhile_tokens(model: CausalLM, device: torch.device) -> int:
    """Tokens that the device takes about as long to compute as the host takes to launch a step by single calls."""
    sizes = [w.shape for w in weights_of(model) if isinstance(w, PackedWeight) and w.shape[0] != model.vocab_size]
    return tokens_that_pay(len(model.attention_layers()), sum(n * k for n, k in sizes), num_multiprocessors(device))


def tokens_that_pay(num_layers: int, num_weights: int, multiprocessors: int) -> int:
    """The same from the numbers of layers, of weights that every token is multiplied with, and of multiprocessors."""
    seconds_a_token = 2 * max(num_weights, 1) / (OPERATIONS_A_SECOND * multiprocessors)
    return int(num_layers * LAUNCH_SECONDS / seconds_a_token)


def fitting_shape(shapes: Sequence[PromptShape], step: Step) -> PromptShape | None:
    """The first of these that holds the step, or None where it had better be launched by single calls."""
    if not shapes or step.num_tokens > shapes[-1].num_tokens:
        return None
    prompts = step.requests[step.num_decodes :]
    if any(item.num_tokens * (item.start + item.num_tokens) > MAX_PROMPT_PAIRS for item in prompts):
        return None
    large = (s for s in shapes if step.num_tokens <= s.num_tokens and len(step.requests) <= s.max_requests)
    return next((s for s in large if len(prompts) <= s.max_prompts), None)


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
                logger.warning("prompts run without CUDA graphs, since they cannot be captured: %s", error)
                break
        self._shapes = sorted(self._graphs, key=_size)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what warming up took
        most = self._shapes[-1].num_tokens if self._shapes else 0
        seconds = time.perf_counter() - begin
        logger.info("captured %s graphs of up to %s tokens with prompts in %.1f s", len(self._graphs), most, seconds)

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
