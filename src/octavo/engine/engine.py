"""The engine: requests in, tokens out, one step at a time.

`LLM` drives it in-process and the engine process drives it for the server, so there is one loop and one scheduler.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from octavo.core.request import Request
from octavo.core.scheduler import Scheduler, SchedulerConfig, Step
from octavo.engine.config import EngineConfig
from octavo.engine.loading import LoadedModel, load
from octavo.engine.memory import KVCachePlan, plan_kv_cache, step_limits
from octavo.engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats
from octavo.engine.outputs import Logprobs
from octavo.engine.runner import Runner, StepResult
from octavo.engine.sampler import SamplingRow
from octavo.errors import UserError

logger = logging.getLogger(__name__)


class Engine:
    """Loads a model and runs requests on it.

    Raises UserError (or a subclass) when the configuration or the checkpoint cannot work.
    """

    def __init__(self, config: EngineConfig) -> None:
        begin = time.perf_counter()
        loaded = load(config)
        plan = plan_kv_cache(config, loaded.groups, loaded.model.max_position, loaded.free_bytes)
        max_num_seqs, max_tokens = step_limits(config)
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_tokens,
                max_model_len=plan.max_model_len,
                block_size=config.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
                policy=config.scheduling_policy,
                max_prefill_tokens_with_decodes=config.max_prefill_tokens_with_decodes,
            ),
            loaded.groups,
            plan.num_blocks,
        )
        self._runner = Runner(
            loaded.model,
            loaded.groups,
            plan.num_blocks,
            config.block_size,
            loaded.kv_dtype,
            max_num_seqs,
            plan.max_model_len,
            loaded.device,
        )
        self._seed = config.seed
        self._eos = frozenset(loaded.eos_token_ids)
        self._requests: dict[str, _Progress] = {}
        self._num_added = 0
        self._stats = EngineStats()
        self.info = _describe(config, loaded, plan, max_num_seqs, max_tokens)
        self.info.load_seconds = time.perf_counter() - begin

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def add(self, item: EngineRequest) -> None:
        """Queue a request. Raises UserError when it can never run; nothing else is disturbed then."""
        if item.request_id in self._requests:
            raise UserError(f"request_id {item.request_id!r} is already running", param="request_id")
        vocab = self.info.vocab_size
        wrong = next((t for t in item.prompt_token_ids if not 0 <= t < vocab), None)
        if wrong is not None:
            raise UserError(f"the prompt holds token id {wrong}; it must be in [0, {vocab})", param="prompt")
        _check_token_lists(item, vocab)
        request = Request(
            item.request_id,
            item.prompt_token_ids,
            item.params,
            time.perf_counter(),
            priority=item.priority,
            cache_salt=item.cache_salt,
            eos_token_ids=self._eos,
        )
        self._scheduler.add(request)
        self._num_added += 1
        seed = item.params.seed if item.params.seed is not None else hash((self._seed, self._num_added))
        row = SamplingRow(
            item.params, seed, request.tokens, request.num_prompt_tokens, request.stop_token_ids, item.bad_words
        )
        self._runner.add(request, row)
        self._requests[item.request_id] = _Progress(request)

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
        """Run one step; returns what it added to each request that moved."""
        step = self._scheduler.schedule()
        if step is None:
            return []
        begin = time.perf_counter()
        for item in step.requests:
            self._requests[item.request.request_id].start(begin)
        try:
            result = self._runner.run(step)
        except Exception as error:
            logger.exception("step %s failed; its %s requests end with an error", step.id, len(step.requests))
            return self._fail(step, f"the engine could not compute this request: {error!r}")
        self._count(step, result, time.perf_counter() - begin)
        outputs = [self._fail_one(name, reason) for name, reason in result.failed.items()]
        for name, entries in result.prompt_logprobs.items():
            self._requests[name].collect_prompt(entries)
        for request in self._scheduler.update(step, result.tokens):
            outputs.append(self._output(request, result))
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot of the scheduler's state and the counters."""
        now, stats = self._scheduler.stats(), self._stats
        stats.running, stats.waiting, stats.kv_usage = now.running, now.waiting, now.kv_usage
        stats.prefix_queries, stats.prefix_hits = now.prefix_queries, now.prefix_hits
        stats.preemptions = now.preemptions
        stats.blocks_total, stats.blocks_free = now.blocks_total, now.blocks_free
        return stats

    def _output(self, request: Request, result: StepResult) -> EngineOutput:
        name = request.request_id
        progress = self._requests[name]
        tokens = result.tokens[name]
        output = EngineOutput(name, tokens, finish_reason=request.finish_reason, stop_reason=request.stop_reason)
        output.num_cached_tokens = request.num_cached_tokens
        if name in result.logprobs:
            output.logprobs = [result.logprobs[name]]
        if not progress.has_answered:
            progress.has_answered = True
            output.queue_s = progress.started - request.arrival_time
            output.prefill_s = time.perf_counter() - progress.started
            output.prompt_logprobs = progress.prompt_logprobs
        if request.finish_reason is not None:
            self._forget(name)
        return output

    def _fail(self, step: Step, reason: str) -> list[EngineOutput]:
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

    def _count(self, step: Step, result: StepResult, seconds: float) -> None:
        stats = self._stats
        generated = sum(map(len, result.tokens.values()))
        stats.steps += 1
        stats.last_step_tokens, stats.last_step_s = step.num_tokens, seconds
        stats.generation_tokens += generated
        for item in step.requests:
            progress = self._requests.get(item.request.request_id)
            if progress is not None and not progress.is_prompt_counted and item.sample:
                progress.is_prompt_counted = True
                stats.prompt_tokens += item.request.num_prompt_tokens


class _Progress:
    """What the engine remembers of a request beside the scheduler's counters."""

    __slots__ = ("has_answered", "is_prompt_counted", "prompt_logprobs", "request", "started")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started = 0.0
        self.has_answered = False
        self.is_prompt_counted = False
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


def _describe(
    config: EngineConfig, loaded: LoadedModel, plan: KVCachePlan, max_num_seqs: int, max_tokens: int
) -> EngineInfo:
    return EngineInfo(
        model=config.model,
        max_model_len=plan.max_model_len,
        vocab_size=loaded.model.vocab_size,
        num_blocks=plan.num_blocks - 1,
        block_size=config.block_size,
        block_bytes=plan.block_bytes,
        kv_bytes_per_token=plan.bytes_per_token,
        max_concurrency=plan.max_concurrency,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        load_seconds=0.0,
        weight_bytes=loaded.model.weight_bytes(),
        eos_token_ids=loaded.eos_token_ids,
        generation_config=loaded.generation_config,
    )
