"""Runs one plan: sends requests when the plan says so and gathers their records."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from octavo.bench.client import LoadClient
from octavo.bench.profiles import RunPlan
from octavo.bench.records import RequestRecord
from octavo.bench.workload import Prompt, Workload

FAILURES_IN_A_ROW = 25
SPIN_NS = 1_500_000  # event loops sleep in whole milliseconds, so the last stretch before a due time is polled


@dataclass(frozen=True)
class Limits:
    """When a run stops starting requests, and how long it then waits for those in flight."""

    max_requests: int | None
    max_seconds: float | None
    drain_seconds: float
    max_concurrency: int | None


@dataclass
class LoadResult:
    """The records of a run in scheduled order, its start and the last moment at which a request could start."""

    records: list[RequestRecord] = field(default_factory=list)
    start_ns: int = 0
    arrivals_end_ns: int = 0
    end_ns: int = 0
    stop_reason: str = "done"  # done | interrupted | failures


class Loader:
    """Sends the requests of one run. `stop` ends it early and keeps what was measured."""

    def __init__(
        self,
        client: LoadClient,
        workload: Workload,
        limits: Limits,
        stop: asyncio.Event,
        on_finished: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self._client = client
        self._workload = workload
        self._limits = limits
        self._stop = stop
        self._on_finished = on_finished
        self._result = LoadResult()
        self._deadline_ns: int | None = None
        self._failures = 0
        self._given_up = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Semaphore(limits.max_concurrency) if limits.max_concurrency else None

    async def run(self, plan: RunPlan) -> LoadResult:
        """Send everything, wait for it, return the records."""
        result = self._result
        gc.collect()
        gc.disable()  # a collection in the middle would count as the server's pause
        try:
            result.start_ns = perf_counter_ns()
            if self._limits.max_seconds is not None:
                self._deadline_ns = result.start_ns + int(self._limits.max_seconds * 1e9)
            if plan.arrivals is not None:
                self._spawn(self._dispatch(plan.arrivals()))
            else:
                streams = plan.streams or 1
                if self._limits.max_requests is not None:
                    streams = min(streams, self._limits.max_requests)
                for _ in range(streams):
                    self._spawn(self._stream())
            await self._finish()
        finally:
            gc.enable()
        result.end_ns = max((r.end_ns for r in result.records), default=perf_counter_ns())
        if not result.arrivals_end_ns:
            result.arrivals_end_ns = min(self._deadline_ns or result.end_ns, result.end_ns)
        result.records.sort(key=lambda r: r.scheduled_ns)
        return result

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._retire)

    def _retire(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)  # a task that raised stays, so that _finish raises it

    def _may_start(self, due_ns: int) -> bool:
        limits = self._limits
        if limits.max_requests is not None and len(self._result.records) >= limits.max_requests:
            return False
        return self._deadline_ns is None or due_ns < self._deadline_ns

    async def _stream(self) -> None:
        """One closed-loop user: the next request when the last has ended."""
        while self._may_start(perf_counter_ns()):
            prompt = self._workload.take()
            body = self._client.body(prompt)
            record = self._new_record(perf_counter_ns())
            await self._client.send(prompt, body, record)
            self._note(record)

    async def _dispatch(self, arrivals: Iterator[float]) -> None:
        """An open loop: each request at its own time, whatever became of the ones before."""
        start_ns = self._result.start_ns
        for offset in arrivals:
            due_ns = start_ns + int(offset * 1e9)
            if not self._may_start(due_ns):
                break
            prompt = self._workload.take()
            body = self._client.body(prompt)
            await _sleep_until(due_ns)
            record = self._new_record(due_ns)
            self._spawn(self._send_open(prompt, body, record))
        else:
            due_ns = self._result.records[-1].scheduled_ns if self._result.records else start_ns
        self._result.arrivals_end_ns = due_ns if self._deadline_ns is None else min(due_ns, self._deadline_ns)

    async def _send_open(self, prompt: Prompt, body: bytes, record: RequestRecord) -> None:
        try:
            async with self._gate or contextlib.nullcontext():
                await self._client.send(prompt, body, record)
        finally:
            record.end_ns = record.end_ns or perf_counter_ns()
        self._note(record)

    def _new_record(self, due_ns: int) -> RequestRecord:
        record = RequestRecord(index=len(self._result.records), scheduled_ns=due_ns)
        self._result.records.append(record)
        return record

    def _note(self, record: RequestRecord) -> None:
        self._failures = self._failures + 1 if record.status == "failed" else 0
        if self._failures >= FAILURES_IN_A_ROW:
            self._given_up.set()
        self._on_finished(record)

    async def _finish(self) -> None:
        """Wait for all tasks, or until the drain time is over, the user interrupts or everything fails."""
        loop = asyncio.get_running_loop()
        watchers = {loop.create_task(self._stop.wait()), loop.create_task(self._given_up.wait())}
        try:
            while self._tasks:
                left = self._seconds_left()
                if left is not None and left <= 0:
                    break
                done, _ = await asyncio.wait({*self._tasks, *watchers}, timeout=left, return_when="FIRST_COMPLETED")
                for task in done - watchers:
                    task.result()
                if self._stop.is_set() or self._given_up.is_set():
                    self._result.stop_reason = "interrupted" if self._stop.is_set() else "failures"
                    break
        finally:
            rest = {*self._tasks, *watchers}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            self._tasks.clear()

    def _seconds_left(self) -> float | None:
        if self._deadline_ns is None:
            return None
        return (self._deadline_ns - perf_counter_ns()) / 1e9 + self._limits.drain_seconds


async def _sleep_until(due_ns: int) -> None:
    while (left := due_ns - perf_counter_ns()) > 0:
        await asyncio.sleep((left - SPIN_NS) / 1e9 if left > 2 * SPIN_NS else 0)
