"""Runs steps from state that lives on the device, so that a step is launched before the last one's tokens are read.

A launch waits for nothing: one copy to the device, the model (as a CUDA graph, if it is small), sampling, one copy
of the tokens back. `collect` waits for that copy. A step that needs tokens on the host to sample (penalties, say) is
sampled there within the launch; the engine has collected every step before it then.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo import ops
from octavo.core.request import Request
from octavo.core.scheduler import ScheduledRequest, Step
from octavo.engine.device_state import DeviceState, PackedStep
from octavo.engine.graphs import DecodeGraphs, Recorder, decode_shapes
from octavo.engine.packing import DecodeShape, Padding, PromptShape, Staging
from octavo.engine.prompt_graphs import PromptGraphs, prompt_shapes, worthwhile_tokens
from octavo.engine.runner import NAN_LOGITS, InFlight, Runner, StepResult
from octavo.engine.sampler import LogprobTensors, SamplingRow, gather_logprobs, logprob_entries
from octavo.engine.shared_prefix import num_shared_tokens
from octavo.models.base import CausalLM

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Launched(InFlight):
    """`tokens` [R], and `logprobs` if one wants them, come to the host for the requests `sampling`.

    `tokens` is None where the launch has sampled, or nothing is.
    """

    staging: Staging
    sampling: list[ScheduledRequest] = field(default_factory=list)
    tokens: Tensor | None = None
    logprobs: LogprobTensors | None = None


class DeviceRunner(Runner):
    """Computes steps of a model whose KV cache is bound, up to `max_steps_in_flight` of them launched ahead.

    `can_share`: decodes whose contexts begin alike take graphs of their own.
    """

    def __init__(self, model: CausalLM, state: DeviceState, use_graphs: bool, can_share: bool = False) -> None:
        super().__init__(model)
        self._state, self._can_share = state, can_share
        self._host_sampled: dict[str, SamplingRow] = {}  # those that may need their tokens on the host
        self._drawn: set[str] = set()  # those that are not greedy
        self._with_logprobs: set[str] = set()
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        if use_graphs:
            recorder = Recorder()
            self._graphs = DecodeGraphs(model, state, recorder)
            self._prompt_graphs = PromptGraphs(model, state, recorder)

    @torch.inference_mode()
    def capture(self, shapes: list[DecodeShape]) -> bool:
        """Capture the decode graphs of these shapes; False if the model cannot be."""
        if self._graphs is None:
            return False
        self._graphs.capture(shapes, {True: self._greedy_head, False: self._sampling_head})
        return self._graphs.failure is None

    @torch.inference_mode()
    def capture_prompts(self, shapes: list[PromptShape]) -> None:
        """Capture the graphs of small prompts of these shapes; where that fails, they are launched call by call."""
        if self._prompt_graphs is not None and self._prompt_graphs.failure is None:
            self._prompt_graphs.capture(shapes)

    def decode_shapes(self) -> list[DecodeShape]:
        """Shapes of decodes that get a graph."""
        return decode_shapes(self._state.max_num_seqs, self._can_share)

    def prompt_shapes(self) -> list[PromptShape]:
        """Shapes of steps with prompts that get a graph."""
        most = min(self._state.max_num_batched_tokens, worthwhile_tokens(self._model, self._state.device))
        return prompt_shapes(self._state.max_num_seqs, most)

    def warm_up(self) -> None:
        """Launch what graphs of every size would hold, on padding."""
        self._state.write_padding()
        if self._graphs is not None and self._prompt_graphs is not None:
            heads = {True: self._greedy_head, False: self._sampling_head}
            self._graphs.warm_up(self.decode_shapes(), heads)
            self._prompt_graphs.warm_up(self.prompt_shapes())

    def add(self, request: Request, row: SamplingRow) -> None:
        super().add(request, row)
        self._state.add(request, row)
        if row.changes_logits:
            self._host_sampled[request.request_id] = row
        if not row.is_greedy:
            self._drawn.add(request.request_id)
        if row.params.logprobs is not None:
            self._with_logprobs.add(request.request_id)

    def remove(self, request_id: str) -> None:
        super().remove(request_id)
        self._state.remove(request_id)
        self._host_sampled.pop(request_id, None)
        self._drawn.discard(request_id)
        self._with_logprobs.discard(request_id)

    def samples_on_host(self) -> bool:
        if self._host_sampled:
            self._host_sampled = {name: row for name, row in self._host_sampled.items() if row.changes_logits}
        return bool(self._host_sampled)

    @torch.inference_mode()
    def launch(self, step: Step) -> InFlight:
        padding = self._padding_of(step)
        packed = self._state.send(step, padding)
        try:
            return self._launch(step, packed, padding)
        finally:
            packed.staging.record()

    def _padding_of(self, step: Step) -> Padding:
        """What the graph that serves a step pads it to, or None."""
        if self._graphs is None or self._prompt_graphs is None:
            return None
        count = len(step.requests)
        if step.num_decodes < count:
            return self._prompt_graphs.shape_for(step)
        shared = num_shared_tokens(step.requests, self._state.block_size) if self._can_share else 0
        return self._graphs.padded_shape(count, shared)

    def _launch(self, step: Step, packed: PackedStep, padding: Padding) -> InFlight:
        decoded = None
        if isinstance(padding, PromptShape):
            assert self._prompt_graphs is not None
            hidden = self._prompt_graphs.run_body(padding)
        elif padding is not None:
            assert self._graphs is not None
            hidden, decoded = self._graphs.run_body(padding), padding
        else:
            hidden = self._model(*self._state.prepare(packed))
        launched = _Launched(step, StepResult(), packed.staging)
        sampling = step.requests
        if packed.samples is not None:
            sampling = [item for item in sampling if item.sample]
        if sampling and self._embedding:
            rows = hidden if packed.samples is None else hidden.index_select(0, packed.samples[0])
            self._take_embeddings(rows, sampling, launched.result)
        if sampling:
            self._sample_step(launched, sampling, packed, hidden, decoded)
        self._take_prompt_logprobs(step, hidden, launched.result)
        return launched

    def _sample_step(
        self,
        launched: _Launched,
        sampling: list[ScheduledRequest],
        packed: PackedStep,
        hidden: Tensor,
        decoded: DecodeShape | None,
    ) -> None:
        count = len(sampling)
        if self._host_sampled and any(item.request.request_id in self._host_sampled for item in sampling):
            rows = hidden[:count] if packed.samples is None else hidden.index_select(0, packed.samples[0])
            self._sample(self._model.compute_logits(rows), sampling, launched.result)
            return
        if decoded is not None and packed.samples is None and not self._with_logprobs:
            assert self._graphs is not None
            self._graphs.run_head(decoded, is_greedy=not self._drawn)
        else:
            if packed.samples is None:
                hidden, rows, ends = hidden[:count], packed.rows[:count], self._state.tensors.seq_lens[:count]
            else:
                index, rows, ends = packed.samples
                hidden = hidden.index_select(0, index)
            self._sample_eagerly(launched, sampling, hidden, rows, ends)
        launched.tokens = packed.staging.tokens[:count]
        launched.tokens.copy_(self._state.sampled[:count], non_blocking=True)
        launched.sampling = sampling

    def _sample_eagerly(
        self, launched: _Launched, sampling: list[ScheduledRequest], hidden: Tensor, rows: Tensor, ends: Tensor
    ) -> None:
        head = self._sampling_head if self._drawn else self._greedy_head
        logits = head(hidden, rows, ends)
        names = self._with_logprobs
        wanted = [int(item.request.params.logprobs or 0) for item in sampling if item.request.request_id in names]
        if wanted:
            vocab = logits.shape[1]
            most = max(vocab if count < 0 else count for count in wanted)
            sampled = self._state.sampled[: len(sampling)]
            gathered = gather_logprobs(ops.log_softmax(logits), sampled, most)
            launched.logprobs = gathered.to_host()

    def _greedy_head(self, hidden: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        logits = self._model.compute_logits(hidden)
        self._keep(ops.argmax(logits), rows)
        return logits

    def _sampling_head(self, hidden: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        logits = self._model.compute_logits(hidden)
        self._keep(ops.sample_tokens(logits, *ops.sampling_inputs(self._state.state, rows, ends)), rows)
        return logits

    def _keep(self, tokens: Tensor, rows: Tensor) -> None:
        ops.keep_tokens(self._state.state, rows, tokens, self._state.sampled[: len(rows)])

    def collect(self, in_flight: InFlight) -> StepResult:
        assert isinstance(in_flight, _Launched)
        result = in_flight.result
        if in_flight.tokens is None:
            return result
        in_flight.staging.wait()
        tokens = in_flight.tokens.tolist()
        for item, token in zip(in_flight.sampling, tokens, strict=True):
            if token >= 0:
                result.tokens[item.request.request_id] = [token]
            else:
                result.failed[item.request.request_id] = NAN_LOGITS
        if in_flight.logprobs is not None:
            self._take_logprobs(in_flight.logprobs, in_flight.sampling, tokens, result)
        return result

    def _take_logprobs(
        self, gathered: LogprobTensors, sampling: list[ScheduledRequest], tokens: list[int], result: StepResult
    ) -> None:
        """Entries of the requests that want them, out of those that were gathered for all."""
        wanted = [
            r
            for r, item in enumerate(sampling)
            if item.request.params.logprobs is not None and item.request.request_id in result.tokens
        ]
        rows = LogprobTensors(*(part[wanted] for part in gathered))
        counts = [int(sampling[r].request.params.logprobs or 0) for r in wanted]
        for r, entry in zip(wanted, logprob_entries(rows, [tokens[r] for r in wanted], counts), strict=True):
            result.logprobs[sampling[r].request.request_id] = entry
