"""Runs a request's sequences in the engine and merges what they produce.

One HTTP request is one or more jobs (prompts times `n`); each job is one request of the engine. The engine yields
tokens; here they become text, stop strings end them, and the measurements of the request are taken.

Leaving `run` early, by an exception, a cancellation or `aclose`, aborts every job that has not ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.engine.answers import tokenize_bad_words
from octavo.engine.client import EngineClient
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.messages import EngineOutput
from octavo.errors import OctavoError
from octavo.server.limits import Admission
from octavo.server.metrics import RequestTimer, ServerMetrics


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate. `index` is its place among the choices of the answer."""

    engine_id: str
    index: int
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    stream_interval: int = 1


@dataclass(slots=True)
class Delta:
    """What is new of one sequence. The last one has a `finish_reason`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Any]] | None
    num_tokens: int  # generated so far
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Any] | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Generator:
    """Submits jobs. `tokenizer` is None when the server has none: answers are token ids then."""

    def __init__(self, client: EngineClient, tokenizer: Any, admission: Admission, metrics: ServerMetrics) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._admission = admission
        self._metrics = metrics

    async def run(self, jobs: list[Job]) -> AsyncGenerator[Delta, None]:
        """The deltas of all jobs as they come. ServerFullError before anything is submitted when they do not fit."""
        self._admission.enter(len(jobs))
        started = time.monotonic()
        open_jobs = {job.index for job in jobs}
        try:
            async with aclosing(self._one(jobs[0]) if len(jobs) == 1 else self._merged(jobs)) as deltas:
                async for delta in deltas:
                    if delta.finish_reason is not None:
                        open_jobs.discard(delta.index)
                        self._admission.leave(started)
                    yield delta
        finally:
            for _ in open_jobs:
                self._admission.leave(started)

    async def _merged(self, jobs: list[Job]) -> AsyncGenerator[Delta, None]:
        """Deltas of several jobs in the order of their arrival; the first that fails takes the others with it."""
        queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

        async def pump(job: Job) -> None:
            try:
                async with aclosing(self._one(job)) as deltas:
                    async for delta in deltas:
                        queue.put_nowait(delta)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(job)) for job in jobs]
        try:
            num_open = len(jobs)
            while num_open:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                num_open -= item.finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, job: Job) -> AsyncGenerator[Delta, None]:
        timer = self._metrics.start_request(len(job.prompt_ids), job.params)
        sequence = _Sequence(job, self._tokenizer, timer)
        try:
            async with aclosing(self._outputs(job)) as outputs:
                async for output in outputs:
                    delta = sequence.add(output)
                    if delta is not None:
                        yield delta
                    if sequence.finish_reason is not None:
                        return
            raise OctavoError(f"the engine ended request {job.engine_id} without a reason")
        except OctavoError:
            sequence.finish_reason = "error"
            raise
        finally:
            timer.finish(sequence.finish_reason or "abort")

    def _outputs(self, job: Job) -> AsyncGenerator[EngineOutput, None]:
        outputs = self._client.generate(
            job.engine_id,
            job.prompt_ids,
            job.params,
            priority=job.priority,
            cache_salt=job.cache_salt,
            bad_words=tokenize_bad_words(self._tokenizer, job.params),
        )
        assert isinstance(outputs, AsyncGenerator)  # so that closing it aborts
        return outputs


class _Sequence:
    """Turns the engine's outputs of one job into deltas."""

    def __init__(self, job: Job, tokenizer: Any, timer: RequestTimer) -> None:
        self._job = job
        self._timer = timer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, job.prompt_ids, job.params)
        self._pending: Delta | None = None
        self._num_tokens = 0
        self._num_cached = 0
        self._has_sent = False
        self.finish_reason: str | None = None

    def add(self, output: EngineOutput) -> Delta | None:
        """The next delta, or None while there is nothing to send yet."""
        self._num_tokens += len(output.token_ids)
        self._num_cached = max(self._num_cached, output.num_cached_tokens or 0)
        self._timer.add(output)
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        text = self._text(output.token_ids, finish_reason)
        if self._detokenizer is not None and self._detokenizer.finished:
            finish_reason, stop_reason = "stop", self._detokenizer.stop_reason
        self.finish_reason = finish_reason
        delta = Delta(
            self._job.index,
            text,
            list(output.token_ids),
            output.logprobs,
            self._num_tokens,
            self._num_cached,
            output.prompt_logprobs,
            finish_reason,
            stop_reason,
        )
        return self._release(delta)

    def _text(self, token_ids: list[int], finish_reason: str | None) -> str:
        if self._detokenizer is None:
            return ""
        # The token that ended the answer (end of sequence, or one of stop_token_ids) is no part of its text.
        if finish_reason == "stop" and not self._job.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return self._detokenizer.append(token_ids, last=finish_reason is not None)

    def _release(self, delta: Delta) -> Delta | None:
        """Gather `stream_interval` tokens into one delta; the first and the last go out at once."""
        merged = delta if self._pending is None else _join(self._pending, delta)
        if not merged.token_ids and merged.finish_reason is None and merged.prompt_logprobs is None:
            return None
        is_due = not self._has_sent or len(merged.token_ids) >= self._job.stream_interval
        if merged.finish_reason is None and not is_due:
            self._pending = merged
            return None
        self._pending, self._has_sent = None, True
        return merged


def _join(first: Delta, second: Delta) -> Delta:
    logprobs = (
        None
        if second.logprobs is None and first.logprobs is None
        else [*(first.logprobs or []), *(second.logprobs or [])]
    )
    return dataclasses.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
