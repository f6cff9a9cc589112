"""Runs the model on scheduler steps and samples: the only part of the engine that touches tensors.

A step is launched and collected, and the next one may be launched in between. `HostRunner` lays steps out on the host
and has its results when a launch returns; `octavo.engine.device_runner` keeps the state of requests on the device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo import ops
from octavo.core.cache_groups import CacheGroup, cache_layout
from octavo.core.request import Request
from octavo.core.scheduler import ScheduledRequest, Step
from octavo.engine.inputs import BlockTables, build_inputs
from octavo.engine.outputs import Logprobs
from octavo.engine.sampler import SamplingRow, sample, top_logprobs
from octavo.models.base import CausalLM
from octavo.ops import KVCache

PROMPT_LOGPROB_ROWS = 256  # rows of logits held at once while prompt log-probabilities are taken
NAN_LOGITS = "the model's logits are not numbers (NaN) for this request"


@dataclass(slots=True)
class StepResult:
    """What one step produced. A request that is missing from `tokens` sampled nothing in it."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[Logprobs]] = field(default_factory=dict)
    embeddings: dict[str, Tensor] = field(default_factory=dict)  # float32 [H] of the last token, on the host
    failed: dict[str, str] = field(default_factory=dict)  # request -> what went wrong with it alone


@dataclass(slots=True)
class InFlight:
    """A launched step; `result` holds what is known of it already."""

    step: Step
    result: StepResult


def bind_cache(
    model: CausalLM,
    groups: list[CacheGroup],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
) -> None:
    """Allocate the KV cache and give each layer its part of it."""
    layout = cache_layout(groups)
    caches = [
        KVCache.allocate(
            num_blocks,
            block_size,
            slot.num_kv_heads,
            slot.head_dim,
            dtype,
            device,
            deterministic=deterministic,
            shares_values=slot.shares_values,
        )
        for slot in layout.slots
    ]
    group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
    layers = range(len(layout.slot_of_layer))
    model.bind_kv_cache([caches[layout.slot_of_layer[i]] for i in layers], [group_of[i] for i in layers])


class Runner:
    """Computes steps of a model whose KV cache is bound. `launch` and `collect` take turns, in the order of steps."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._rows: dict[str, SamplingRow] = {}
        self._embedding: set[str] = set()  # those whose hidden state is wanted

    def add(self, request: Request, row: SamplingRow) -> None:
        """Make a request known before its first step; `row` shares its token lists with the request."""
        self._rows[request.request_id] = row
        if request.embeds:
            self._embedding.add(request.request_id)

    def remove(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._rows.pop(request_id, None)
        self._embedding.discard(request_id)

    def samples_on_host(self) -> bool:
        """Whether a request cannot be sampled before the host knows the tokens before it: take one step at a time."""
        return True

    @abstractmethod
    def launch(self, step: Step) -> InFlight:
        """Start computing a step's tokens, and sampling where the scheduler asks for it."""

    @abstractmethod
    def collect(self, in_flight: InFlight) -> StepResult:
        """Wait for the oldest launched step and return what it produced."""

    def run(self, step: Step) -> StepResult:
        """Launch a step and wait for it."""
        return self.collect(self.launch(step))

    def _sample(self, logits: Tensor, sampling: Sequence[ScheduledRequest], result: StepResult) -> None:
        sampled = sample(logits, [self._rows[item.request.request_id] for item in sampling])
        for item, token, logprobs in zip(sampling, sampled.token_ids, sampled.logprobs, strict=True):
            name = item.request.request_id
            if token is None:
                result.failed[name] = NAN_LOGITS
                continue
            result.tokens[name] = [token]
            if logprobs is not None:
                result.logprobs[name] = logprobs

    def _take_embeddings(self, rows: Tensor, sampling: Sequence[ScheduledRequest], result: StepResult) -> None:
        """Copy the hidden rows of requests that want them to the host; on a GPU they are there once the step is."""
        wanted = [r for r, item in enumerate(sampling) if item.request.embeds]
        index = torch.tensor(wanted, dtype=torch.int64, device=rows.device)
        copies = rows.index_select(0, index).float().to("cpu", non_blocking=True)
        for r, copy in zip(wanted, copies, strict=True):
            result.embeddings[sampling[r].request.request_id] = copy

    def _take_prompt_logprobs(self, step: Step, hidden: Tensor, result: StepResult) -> None:
        offset = 0
        for item in step.requests:
            if item.num_prompt_logprob_rows:
                first = offset + item.prompt_logprob_start - item.start
                rows = hidden[first : first + item.num_prompt_logprob_rows]
                result.prompt_logprobs[item.request.request_id] = self._prompt_logprobs(item, rows)
            offset += item.num_tokens

    def _prompt_logprobs(self, item: ScheduledRequest, hidden: Tensor) -> list[Logprobs]:
        """Entries for the prompt tokens that these rows predict: each row is about the token after its own."""
        request = item.request
        first_target = item.prompt_logprob_start + 1
        targets = request.tokens[first_target : first_target + item.num_prompt_logprob_rows]
        count = int(request.params.prompt_logprobs or 0)
        entries: list[Logprobs] = []
        for first in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[first : first + PROMPT_LOGPROB_ROWS]
            logits = self._model.compute_logits(hidden[first : first + len(part)])
            entries += top_logprobs(ops.log_softmax(logits), part, [count] * len(part))
        return entries


class HostRunner(Runner):
    """Lays each step out on the host and waits for it: for a CPU, where there is nothing to overlap with."""

    def __init__(
        self,
        model: CausalLM,
        num_groups: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        super().__init__(model)
        self._num_groups, self._block_size, self._device = num_groups, block_size, device
        self._tables = BlockTables(num_groups, max_num_seqs, -(-max_model_len // block_size))

    def remove(self, request_id: str) -> None:
        super().remove(request_id)
        self._tables.release(request_id)

    @torch.inference_mode()
    def launch(self, step: Step) -> InFlight:
        inputs = build_inputs(step, self._tables, self._num_groups, self._block_size, self._device)
        hidden = self._model(inputs.input_ids, inputs.positions, inputs.step)
        done = InFlight(step, StepResult())
        sampling = [item for item in step.requests if item.sample]
        if sampling:
            rows = hidden[inputs.sample_rows]
            if self._embedding:
                self._take_embeddings(rows, sampling, done.result)
            self._sample(self._model.compute_logits(rows), sampling, done.result)
        self._take_prompt_logprobs(step, hidden, done.result)
        return done

    def collect(self, in_flight: InFlight) -> StepResult:
        return in_flight.result
