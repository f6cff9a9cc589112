"""The engine: requests in, tokens out, one step at a time.

`LLM` drives it in-process and the engine process drives it for the server, so there is one loop and one scheduler.
On a GPU a step is launched before the one before it is collected, so that the device never waits for the host; what
ends a request (a stop token, an abort) is then known one step late, and that step's token is dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from octavo import ops
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler, SchedulerConfig, Step
from octavo.engine.config import EngineConfig
from octavo.engine.dense_copies import keep_dense_copies
from octavo.engine.embedding import causal_embedding_info, embedding_bytes
from octavo.engine.loading import LoadedModel, load, pick_device
from octavo.engine.memory import KVCachePlan, StepLimits, plan_kv_cache, step_limits
from octavo.engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats
from octavo.engine.outputs import Logprobs
from octavo.engine.runner import InFlight, StepResult
from octavo.engine.sampler import SamplingRow
from octavo.engine.start import (
    Phases,
    build_runner,
    collector_at_rest,
    compile_kernels,
    import_libraries,
    measure_step,
)
from octavo.errors import UserError

logger = logging.getLogger(__name__)


class Engine:
    """Loads a model and runs requests on it; `is_serving` keeps the steps of a server's streams short.

    Raises UserError (or a subclass) when the configuration or the checkpoint cannot work.
    """

    def __init__(self, config: EngineConfig, *, is_serving: bool = False) -> None:
        begin, phases = time.perf_counter(), Phases()
        self.start_seconds = phases.seconds
        with collector_at_rest():
            self._start(config, is_serving, phases)
        self.info.load_seconds = time.perf_counter() - begin
        logger.info("ready after %.1f s: %s", self.info.load_seconds, phases)

    def _start(self, config: EngineConfig, is_serving: bool, phases: Phases) -> None:
        ops.begin_ahead(pick_device(config.device))
        with phases("weights"):
            loaded = load(config)
            keep_dense_copies(loaded, config.dense_copies)
        self._limits = limits = step_limits(config, loaded.device, is_serving)
        with phases("libraries"):
            import_libraries(loaded, config)
        with phases("kernels"):
            self.num_compiled = compile_kernels(loaded, config, limits, phases)
        memory = measure_step(loaded, config, limits, phases)
        free_bytes = loaded.free_bytes() - memory.num_bytes
        plan = plan_kv_cache(config, loaded.groups, loaded.model.max_position, free_bytes, limits)
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_prefill_tokens=limits.max_prefill_tokens,
                max_model_len=plan.max_model_len,
                block_size=config.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
                policy=config.scheduling_policy,
                max_prefill_tokens_with_decodes=limits.max_prefill_tokens_with_decodes,
                target_itl_ms=config.target_itl_ms,
                prefill_cap_range=limits.prefill_cap_range,
                max_steps_in_flight=limits.max_steps_in_flight,
            ),
            loaded.groups,
            plan.num_blocks,
        )
        self._runner = build_runner(
            loaded, config, limits, plan.num_blocks, plan.max_model_len, memory.can_capture, phases
        )
        self._in_flight: deque[tuple[InFlight, float]] = deque()  # launched steps and when they were
        self._last_collected = 0.0
        self._seed = config.seed
        self._eos = frozenset(loaded.eos_token_ids)
        self._requests: dict[str, _Progress] = {}
        self._num_added = 0
        self._stats = EngineStats()
        self._peak_running, self._peak_kv_usage = 0, 0.0  # since the last snapshot
        self.info = _describe(config, loaded, plan, limits)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def add(self, item: EngineRequest) -> None:
        """Queue a request. Raises UserError when it can never run; nothing else is disturbed then."""
        if item.request_id in self._requests:
            raise UserError(f"request_id {item.request_id!r} is already running", param="request_id")
        vocab = self.info.vocab_size
        ids = item.prompt_token_ids
        if ids and (min(ids) < 0 or max(ids) >= vocab):  # a loop over them would take 10 ms for a batch of long prompts
            wrong = next(t for t in ids if not 0 <= t < vocab)
            raise UserError(f"the prompt holds token id {wrong}; it must be in [0, {vocab})", param="prompt")
        _check_token_lists(item, vocab)
        self._check_task(item)
        request = Request(
            item.request_id,
            item.prompt_token_ids,
            item.params,
            time.perf_counter(),
            priority=item.priority,
            cache_salt=item.cache_salt,
            eos_token_ids=self._eos,
            embeds=item.embeds,
        )
        self._scheduler.add(request)
        self._num_added += 1
        seed = item.params.seed if item.params.seed is not None else hash((self._seed, self._num_added))
        row = SamplingRow(
            item.params, seed, request.tokens, request.num_prompt_tokens, request.stop_token_ids, item.bad_words
        )
        self._runner.add(request, row)
        self._requests[item.request_id] = _Progress(request)

    def _check_task(self, item: EngineRequest) -> None:
        if item.embeds and self.info.embedding is None:
            raise UserError(
                f"{self.info.model} makes no embeddings (runner 'generate', or a pooling that is not known)"
            )
        if not item.embeds and not self.info.can_generate:
            raise UserError(f"{self.info.model} is served with runner 'pooling': it makes embeddings only")

    def abort(self, request_id: str) -> None:
        """Stop a request and free what it holds; unknown or finished ones are ignored (the abort came late)."""
        if request_id in self._requests:
            self._scheduler.abort(request_id)
            self._forget(request_id)

    def finish(self, request_id: str, stop_reason: int | str | None) -> None:
        """End a request because a stop string was found in its text."""
        if request_id in self._requests:
            self._scheduler.finish(request_id, "stop", stop_reason)
            self._forget(request_id)

    def step(self) -> list[EngineOutput]:
        """Launch a step and collect the oldest one; returns what that added to each request that moved.

        Up to `max_steps_in_flight` steps are in flight in between, so the first call may return nothing. A request
        whose sampling needs its tokens on the host makes the engine take one step at a time.
        """
        depth, outputs = self._limits.max_steps_in_flight, []
        if depth > 1 and self._runner.samples_on_host():
            depth, outputs = 1, self.drain()
        step = self._scheduler.schedule()
        if step is not None:
            self._peak_running = max(self._peak_running, len(self._scheduler.states.running()))
            self._peak_kv_usage = max(self._peak_kv_usage, self._scheduler.cache.pool.usage)
            outputs += self._launch(step)
        if self._in_flight and (step is None or len(self._in_flight) >= depth):
            outputs += self._collect()
        return outputs

    def drain(self) -> list[EngineOutput]:
        """Collect every step in flight, without launching another."""
        outputs = []
        while self._in_flight:
            outputs += self._collect()
        return outputs

    def _launch(self, step: Step) -> list[EngineOutput]:
        begin = time.perf_counter()
        for item in step.requests:
            self._requests[item.request.request_id].start(begin)
        try:
            self._in_flight.append((self._runner.launch(step), begin))
        except Exception as error:
            return self._fail(step, error)
        return []

    def _collect(self) -> list[EngineOutput]:
        in_flight, begin = self._in_flight.popleft()
        step = in_flight.step
        try:
            result = self._runner.collect(in_flight)
        except Exception as error:
            return self._fail(step, error)
        now = time.perf_counter()
        seconds = now - max(begin, self._last_collected)
        self._count(step, seconds)
        self._scheduler.observe(step, seconds)
        self._last_collected = now
        outputs = []
        if result.failed or result.prompt_logprobs:
            outputs = self._take_rare(step, result)
        for request in self._scheduler.update(step, result.tokens):
            outputs.append(self._output(request, result))
        return outputs

    def _take_rare(self, step: Step, result: StepResult) -> list[EngineOutput]:
        """Failures of single requests, and log-probabilities of prompts."""
        outputs = []
        for item in step.requests:
            name = item.request.request_id
            if item.is_void:  # it ended while the step was in flight
                continue
            if name in result.failed:
                outputs.append(self._fail_one(name, result.failed[name]))
            elif name in result.prompt_logprobs:
                self._requests[name].collect_prompt(result.prompt_logprobs[name])
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot of the scheduler's state and the counters; the peaks count anew from here."""
        now, stats = self._scheduler.stats(), self._stats
        stats.peak_running, self._peak_running = max(now.running, self._peak_running), 0
        stats.peak_kv_usage, self._peak_kv_usage = max(now.kv_usage, self._peak_kv_usage), 0.0
        stats.running, stats.waiting, stats.kv_usage = now.running, now.waiting, now.kv_usage
        stats.prefix_queries, stats.prefix_hits = now.prefix_queries, now.prefix_hits
        stats.preemptions = now.preemptions
        stats.blocks_total, stats.blocks_free = now.blocks_total, now.blocks_free
        return stats

    def _output(self, request: Request, result: StepResult) -> EngineOutput:
        name = request.request_id
        progress = self._requests[name]
        tokens = [] if request.embeds else result.tokens[name]
        self._stats.generation_tokens += len(tokens)
        output = EngineOutput(name, tokens, finish_reason=request.finish_reason, stop_reason=request.stop_reason)
        output.num_cached_tokens = request.num_cached_tokens
        if name in result.logprobs:
            output.logprobs = [result.logprobs[name]]
        if not progress.has_answered:
            progress.has_answered = True
            output.queue_s = progress.started - request.arrival_time
            output.prefill_s = time.perf_counter() - progress.started
            output.prompt_logprobs = progress.prompt_logprobs
        if request.embeds:
            assert self.info.embedding is not None
            output.finish_reason = "stop"  # at the one token that every step samples, which nobody asked for
            output.embedding = embedding_bytes(result.embeddings[name], self.info.embedding.is_normalized)
        if request.finish_reason is not None:
            self._forget(name)
        return output

    def _fail(self, step: Step, error: Exception) -> list[EngineOutput]:
        """End the requests of a step that could not be computed; call it where the error is being handled."""
        logger.exception("step %s failed; its %s requests end with an error", step.id, len(step.requests))
        reason = f"the engine could not compute this request: {error!r}"
        outputs = []
        for request in self._scheduler.fail(step, reason):
            if request.request_id in self._requests:
                outputs.append(EngineOutput(request.request_id, finish_reason="error", error=reason))
                self._forget(request.request_id)
        return outputs

    def _fail_one(self, request_id: str, reason: str) -> EngineOutput:
        self._scheduler.finish(request_id, "error", error=reason)
        self._forget(request_id)
        return EngineOutput(request_id, finish_reason="error", error=reason)

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._runner.remove(request_id)

    def _count(self, step: Step, seconds: float) -> None:
        stats = self._stats
        stats.steps += 1
        stats.last_step_tokens, stats.last_step_s = step.num_tokens, seconds
        for item in step.requests:
            if item.sample and not item.request.num_output_tokens and not item.is_void:
                stats.prompt_tokens += item.request.num_prompt_tokens


class _Progress:
    """What the engine remembers of a request beside the scheduler's counters."""

    __slots__ = ("has_answered", "prompt_logprobs", "request", "started")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started = 0.0
        self.has_answered = False
        wants_prompt = request.params.prompt_logprobs is not None
        self.prompt_logprobs: list[Logprobs | None] | None = [None] if wants_prompt else None

    def start(self, now: float) -> None:
        self.started = self.started or now

    def collect_prompt(self, entries: list[Logprobs]) -> None:
        assert self.prompt_logprobs is not None
        self.prompt_logprobs += entries


def _check_token_lists(item: EngineRequest, vocab: int) -> None:
    params = item.params
    listed: dict[str, Any] = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": params.logit_bias,
    }
    for name, tokens in listed.items():
        wrong = next((t for t in tokens or () if not 0 <= int(t) < vocab), None)
        if wrong is not None:
            raise UserError(f"{name} holds token id {wrong}; it must be in [0, {vocab})", param=name)


def _describe(config: EngineConfig, loaded: LoadedModel, plan: KVCachePlan, limits: StepLimits) -> EngineInfo:
    return EngineInfo(
        model=config.model,
        max_model_len=plan.max_model_len,
        vocab_size=loaded.model.vocab_size,
        num_blocks=plan.num_blocks - 1,
        block_size=config.block_size,
        block_bytes=plan.block_bytes,
        kv_bytes_per_token=plan.bytes_per_token,
        max_concurrency=plan.max_concurrency,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        load_seconds=0.0,
        weight_bytes=loaded.model.weight_bytes(),
        eos_token_ids=loaded.eos_token_ids,
        generation_config=loaded.generation_config,
        can_generate=loaded.can_generate,
        embedding=None if config.runner == "generate" else causal_embedding_info(loaded.checkpoint, loaded.model),
    )
