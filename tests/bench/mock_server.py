"""A small OpenAI-compatible server whose truth is known: it keeps the time at which it sent every chunk.

Each request is answered by a `Behaviour` that the test chooses. Times are perf_counter_ns, the clock that the client
uses, so the client's figures are compared with what happened here and not with what a sleep was meant to last.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any


@dataclass
class Behaviour:
    """How one request is answered. `fault`: reset, truncate, stream_error, garbage, hang or none."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    gaps_s: list[float] | None = None
    num_tokens: int | None = None  # default: what was asked for
    tokens_per_chunk: int = 1
    usage: bool = True
    cached_tokens: int = 0
    empty_text_at: int | None = None  # the token with this index has no text
    status: int = 200
    fault: str | None = None
    fault_after: int = 2  # chunks before the fault
    close: bool = False  # "Connection: close" and a body without chunked encoding
    split_writes: bool = False  # every byte of a chunk in a write of its own


@dataclass
class Served:
    """What the server saw and did for one request."""

    arrived_ns: int
    body: dict[str, Any]
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    sent_ns: list[int] = field(default_factory=list)
    ended_ns: int = 0
    is_disconnected: bool = False


class MockServer:
    """Serves on a free port from a thread of its own while the context is open."""

    def __init__(self, behave: Callable[[dict[str, Any], int], Behaviour] | Behaviour | None = None) -> None:
        self._behave = behave
        self.served: list[Served] = []
        self.max_in_flight = 0
        self.num_connections = 0
        self.refuse_continuous_usage = False
        self.has_tokenizer = True
        self._in_flight = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> MockServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def loads(self) -> list[Served]:
        """The requests of the load: all but the first, which is the client's preflight."""
        return self.served[1:]

    def _main(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                arrived = perf_counter_ns()
                method, path, _ = head.split(" ", 2)
                pairs = (line.partition(":") for line in head.split("\r\n")[1:])
                headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(raw) if raw else {}
                if not await self._route(writer, method, path, Served(arrived, body, path, headers)):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _route(self, writer: asyncio.StreamWriter, method: str, path: str, served: Served) -> bool:
        if path in ("/v1/completions", "/v1/chat/completions"):
            return await self._complete(writer, served)
        answers: dict[str, Any] = {"/v1/models": {"data": [{"id": "mock"}]}, "/version": {"version": "mock-1"}}
        if path == "/tokenize" and self.has_tokenizer:
            # A word is one token, one of more than six letters two.
            words = served.body["prompt"].split()
            ids = [i for w in words for i in ([sum(w.encode()) + len(w)] if len(w) <= 6 else [7, len(w)])]
            answers[path] = {"tokens": ids, "count": len(ids)}
        if path == "/metrics":
            text = (
                "# HELP vllm:num_requests_running x\n"
                f'vllm:num_requests_running{{model_name="mock"}} {self._in_flight}\n'
                'vllm:num_requests_waiting{model_name="mock"} 0.0\nvllm:kv_cache_usage_perc{model_name="mock"} 0.25\n'
                f'vllm:generation_tokens_total{{model_name="mock"}} {sum(len(s.sent_ns) for s in self.served)}\n'
            )
            await _plain(writer, 200, text.encode())
        elif path in answers:
            await _plain(writer, 200, json.dumps(answers[path]).encode())
        else:
            await _plain(writer, 404, json.dumps({"error": {"message": f"no route {path}"}}).encode())
        return True

    async def _complete(self, writer: asyncio.StreamWriter, served: Served) -> bool:
        if self.refuse_continuous_usage and "continuous_usage_stats" in served.body.get("stream_options", {}):
            await _plain(writer, 400, b'{"error": {"message": "unknown field continuous_usage_stats"}}')
            return True
        index = len(self.served)
        self.served.append(served)
        behaviour = self._behave(served.body, index) if callable(self._behave) else self._behave or Behaviour()
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        try:
            return await self._answer(writer, served, behaviour)
        except ConnectionError:
            served.is_disconnected = True
            raise
        finally:
            self._in_flight -= 1
            served.ended_ns = perf_counter_ns()

    async def _answer(self, writer: asyncio.StreamWriter, served: Served, how: Behaviour) -> bool:
        if how.status != 200:
            await _plain(writer, how.status, json.dumps({"error": {"message": f"refused {how.status}"}}).encode())
            return True
        if how.fault == "hang":
            await asyncio.sleep(60)
        framing = b"Connection: close\r\n" if how.close else b"Transfer-Encoding: chunked\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + framing + b"\r\n")
        asked = served.body.get("max_tokens") or served.body.get("max_completion_tokens") or 16
        total = how.num_tokens if how.num_tokens is not None else asked
        is_chat = "messages" in served.body
        if is_chat:
            await self._event(writer, how, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        sent, chunk = 0, 0
        while sent < total:
            delay = how.ttft_s if chunk == 0 else how.itl_s if how.gaps_s is None else how.gaps_s[chunk - 1]
            if delay:
                await asyncio.sleep(delay)
            if how.fault and chunk == how.fault_after:
                return await self._break(writer, how)
            count = min(how.tokens_per_chunk, total - sent)
            text = "" if how.empty_text_at == sent else " word" * count
            sent, chunk = sent + count, chunk + 1
            reason = "length" if sent == total else None
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
            choice |= {"delta": {"content": text}} if is_chat else {"text": text}
            event: dict[str, Any] = {"id": "x", "choices": [choice]}
            if how.usage and served.body.get("stream_options", {}).get("continuous_usage_stats"):
                event["usage"] = {"prompt_tokens": 5, "completion_tokens": sent}
            served.sent_ns.append(perf_counter_ns())  # before it is written: a reader cannot have it any earlier
            await self._event(writer, how, event)
            if writer.transport.is_closing():
                raise ConnectionResetError
        if how.usage:
            prompt = served.body.get("prompt", "")
            usage = {"prompt_tokens": len(prompt) if isinstance(prompt, list) else len(prompt.split())}
            usage |= {"completion_tokens": total, "prompt_tokens_details": {"cached_tokens": how.cached_tokens}}
            await self._event(writer, how, {"choices": [], "usage": usage})
        await self._event(writer, how, None)
        if not how.close:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return not how.close

    async def _break(self, writer: asyncio.StreamWriter, how: Behaviour) -> bool:
        if how.fault == "stream_error":
            await self._event(writer, how, {"error": {"message": "the engine choked", "type": "server_error"}})
            writer.write(b"0\r\n\r\n")
            return True
        if how.fault == "garbage":
            payload = b"data: {not json}\n\n"
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(payload), payload))
            return True
        if how.fault == "truncate":
            writer.write(b"0\r\n\r\n")  # a proper end of the body, without finish reason and [DONE]
            return True
        writer.transport.abort()
        return False

    async def _event(self, writer: asyncio.StreamWriter, how: Behaviour, event: dict[str, Any] | None) -> None:
        payload = b"data: " + (b"[DONE]" if event is None else json.dumps(event).encode()) + b"\n\n"
        data = payload if how.close else b"%x\r\n%b\r\n" % (len(payload), payload)
        if how.split_writes:
            for i in range(len(data)):
                writer.write(data[i : i + 1])
                await asyncio.sleep(0)
        else:
            writer.write(data)
        await writer.drain()


async def _plain(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
    await writer.drain()
