"""The server's handle on the engine process: asynchronous requests over a private socket."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import zmq
import zmq.asyncio

from octavo import errors
from octavo.core.sampling_params import SamplingParams
from octavo.engine.config import EngineConfig
from octavo.engine.mailbox import Mailbox
from octavo.engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats
from octavo.engine.protocol import Failure, ToEngine, decode_from_engine, encode, encode_config
from octavo.engine.recent_peak import RecentPeak
from octavo.errors import EngineDeadError, OctavoError, UserError

STALL_SECONDS = 10.0
STALL_FACTOR = 5.0
WATCH_INTERVAL_SECONDS = 0.25
PEAK_SECONDS = 0.5  # a peak is told for so long, so that whoever looks ten times a second misses none


class EngineClient:
    """Requests to an engine that runs in its own process. Create it with `await EngineClient.start(config)`."""

    engine_module = "octavo.engine.process"  # a benchmark puts one without a model in its place

    def __init__(self, process: subprocess.Popen[bytes], socket: zmq.asyncio.Socket, folder: Path) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder
        self._queues: dict[str, Mailbox] = {}
        self._stats = EngineStats()
        self._peak_running, self._peak_kv_usage = RecentPeak(PEAK_SECONDS), RecentPeak(PEAK_SECONDS)
        self._heard = time.monotonic()
        self._slowest_step = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._is_dead = False
        self._is_ready = False
        self.info: EngineInfo

    @classmethod
    async def start(cls, config: EngineConfig) -> Self:
        """Start the process and wait until the model is loaded. Raises the engine's own error when it cannot start."""
        folder = Path(tempfile.mkdtemp(prefix="octavo-"))  # mode 0700: nobody else can reach the socket
        address = f"ipc://{folder}/engine"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.bind(address)
        command = [sys.executable, "-m", cls.engine_module, address]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(encode_config(config) + b"\n")
        process.stdin.flush()
        client = cls(process, socket, folder)
        try:
            await client._wait_until_ready()
        except BaseException:
            await client.shutdown()
            raise
        client._tasks = [asyncio.create_task(client._receive()), asyncio.create_task(client._watch())]
        return client

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        bad_words: list[list[int]] | None = None,
    ) -> AsyncIterator[EngineOutput]:
        """The outputs of one request (params.n must be 1) as they come; the last one has a finish_reason.

        Leaving the iterator early (a break, a cancelled task) aborts the request in the engine. Raises UserError when
        the engine refuses the request and EngineDeadError when the engine died.
        """
        self._check_alive()
        if request_id in self._queues:
            raise UserError(f"request_id {request_id!r} is already running", param="request_id")
        queue = self._queues[request_id] = Mailbox()
        item = EngineRequest(request_id, prompt_token_ids, params, priority, cache_salt, bad_words or [])
        is_over = False
        try:
            await self._send(ToEngine(add=[item]))
            while not is_over:
                output = await queue.get()
                is_over = output.finish_reason is not None
                if output.error is not None:
                    raise self._request_error(output)
                yield output
        finally:
            self._queues.pop(request_id, None)
            if not is_over and not self._is_dead:
                await self._send(ToEngine(abort=[request_id]))

    async def embed(self, items: list[EngineRequest]) -> list[EngineOutput]:
        """The outputs of several embedding requests, which reach the engine together, in their order.

        A cancelled task aborts what has not ended. Raises as `generate` does.
        """
        self._check_alive()
        queues = {item.request_id: Mailbox() for item in items}
        self._queues |= queues
        found: dict[str, EngineOutput] = {}
        try:
            await self._send(ToEngine(add=items))
            for name, queue in queues.items():
                output = found[name] = await queue.get()
                if output.error is not None:
                    raise self._request_error(output)
        finally:
            for name in queues:
                del self._queues[name]
            if len(found) < len(items) and not self._is_dead:
                await self._send(ToEngine(abort=[name for name in queues if name not in found]))
        return list(found.values())

    async def abort(self, request_id: str) -> None:
        """Stop a request; its iterator ends with finish_reason "abort". Unknown requests are ignored."""
        queue = self._queues.get(request_id)
        if queue is not None:
            await self._send(ToEngine(abort=[request_id]))
            queue.put(EngineOutput(request_id, finish_reason="abort"))

    def stats(self) -> EngineStats:
        """The newest snapshot of the engine (at most half a second old while it is idle).

        Its peaks are those of the last PEAK_SECONDS.
        """
        stats = self._stats
        stats.peak_running = int(self._peak_running.most(default=stats.running))
        stats.peak_kv_usage = self._peak_kv_usage.most(default=stats.kv_usage)
        return stats

    @property
    def is_dead(self) -> bool:
        """Whether the engine process ended."""
        return self._is_dead or self._process.poll() is not None

    @property
    def is_alive(self) -> bool:
        """False when the engine ended, or when it was silent for longer than a step can take."""
        if self.is_dead:
            return False
        patience = max(STALL_SECONDS, STALL_FACTOR * self._slowest_step)
        return time.monotonic() - self._heard < patience

    async def shutdown(self) -> None:
        """Stop the engine process and remove its socket. Requests that still run end with EngineDeadError."""
        for task in self._tasks:
            task.cancel()
        self._mark_dead()
        if self._process.poll() is None and self._is_ready:
            await self._send(ToEngine(is_shutdown=True))
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, 3)
        if self._process.poll() is None:  # it loads still, and reads no message before that, or it is stuck
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_until_ready(self) -> None:
        while not await self._socket.poll(200):
            if self._process.poll() is not None and not await self._socket.poll(0):
                raise EngineDeadError(
                    f"the engine process ended with status {self._process.returncode} while it loaded the model; "
                    "its own message stands above"
                )
        message = decode_from_engine(await self._socket.recv())
        if message.failure is not None:
            raise _rebuild(message.failure)
        assert message.info is not None
        self.info = message.info
        self._is_ready = True
        self._stats = message.stats or self._stats
        self._heard = time.monotonic()

    def _take_stats(self, stats: EngineStats) -> None:
        self._peak_running.add(stats.peak_running)
        self._peak_kv_usage.add(stats.peak_kv_usage)
        self._stats = stats

    async def _send(self, message: ToEngine) -> None:
        await self._socket.send(encode(message))

    async def _receive(self) -> None:
        while True:
            message = decode_from_engine(await self._socket.recv())
            self._heard = time.monotonic()
            if message.stats is not None:
                self._take_stats(message.stats)
                self._slowest_step = max(0.99 * self._slowest_step, message.stats.last_step_s)
            for output in message.outputs:  # before the plain ones, since first tokens are among them
                queue = self._queues.get(output.request_id)
                if queue is not None:
                    queue.put(output)
            for name, token in zip(message.names, message.tokens, strict=True):
                queue = self._queues.get(name)
                if queue is not None:
                    queue.put(EngineOutput(name, [token]))

    async def _watch(self) -> None:
        while self._process.poll() is None:
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)
        self._mark_dead()

    def _mark_dead(self) -> None:
        self._is_dead = True
        for request_id, queue in self._queues.items():
            queue.put(EngineOutput(request_id, finish_reason="error", error="the engine process ended"))

    def _request_error(self, output: EngineOutput) -> OctavoError:
        """Why one request ended: refused (its error's class came as the stop reason), failed alone, or all are lost."""
        if output.stop_reason is not None:
            return _rebuild(Failure(str(output.stop_reason), output.error or ""))
        return (EngineDeadError if self._is_dead else OctavoError)(output.error or "")

    def _check_alive(self) -> None:
        if self.is_dead:
            raise EngineDeadError("the engine process ended; restart the server")


def _rebuild(failure: Failure) -> OctavoError:
    kind = getattr(errors, failure.kind, OctavoError)
    error = kind(failure.message)
    assert isinstance(error, OctavoError)
    return error
