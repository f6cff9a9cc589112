"""Answers that take time: a JSON body once it is ready, or a stream of server-sent events.

Both speak ASGI directly: while the answer is made, the connection is watched, and a client that goes away cancels the
work, which aborts its requests in the engine, also while they still wait in the queue.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.server.errors import ApiError, as_api_error, internal_error

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "content-type": "text/event-stream; charset=utf-8",
}

encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """One server-sent event with a JSON value."""
    return b"data: " + encode(value) + b"\n\n"


class EventTemplate:
    """Events that differ in one string: the JSON around it is encoded once, and not for every token.

    `make` builds the value around a given string, which must stand in it once.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        mark = uuid.uuid4().hex  # occurs nowhere else
        self._head, self._tail = event(make(mark)).split(encode(mark))

    def event(self, text: str) -> bytes:
        return self._head + encode(text) + self._tail


class LateReply(Response):
    """Base of answers that are made while the connection is watched."""

    def __init__(self, headers: dict[str, str] | None = None) -> None:
        super().__init__(headers=headers)
        self._extra = headers or {}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        # Once an answer has begun, what the layers between the gate and here do to `send` is done.
        send_body = scope.get("state", {}).get("send_body", send)
        work = asyncio.ensure_future(self._answer(send, send_body))
        watch = asyncio.ensure_future(_until_disconnected(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when the server cancels this task at shutdown
            was_complete = work.done()
            for task in (work, watch):
                task.cancel()
            results = await asyncio.gather(work, watch, return_exceptions=True)
        if was_complete and isinstance(results[0], Exception):
            raise results[0]

    async def _answer(self, send: Send, send_body: Send) -> None:
        """Send the start of the answer through `send`, and what follows through either."""
        raise NotImplementedError

    async def _send_whole(self, send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
        fields = {"content-type": "application/json", "content-length": str(len(body))} | self._extra | headers
        await send({"type": "http.response.start", "status": status, "headers": _raw(fields)})
        await send({"type": "http.response.body", "body": body})

    async def _send_error(self, send: Send, error: ApiError) -> None:
        await self._send_whole(send, error.status, error.encoded(), error.headers)


class JsonReply(LateReply):
    """Sends what `work` returns, or the error that it raises."""

    def __init__(self, work: Coroutine[Any, Any, Any], headers: dict[str, str] | None = None) -> None:
        super().__init__(headers)
        self._work = work

    async def _answer(self, send: Send, send_body: Send) -> None:
        try:
            body = encode(await self._work)
        except Exception as error:
            await self._send_error(send, explain(error))
            return
        await self._send_whole(send, 200, body, {})


class EventStream(LateReply):
    """Sends the events of `events`, then [DONE].

    The status is decided by the first event: an error before it is an ordinary error answer. A later one is an event
    with the error object, followed by [DONE].
    """

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        super().__init__(headers)
        self._events = events

    async def _answer(self, send: Send, send_body: Send) -> None:
        has_started = False
        try:
            async with aclosing(self._events) as events:
                async for chunk in events:
                    if not has_started:
                        has_started = True
                        fields = _STREAM_HEADERS | self._extra
                        await send({"type": "http.response.start", "status": 200, "headers": _raw(fields)})
                    await send_body({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            if not has_started:
                await self._send_error(send, explain(error))
                return
            body = event(explain(error).body())
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def explain(error: Exception) -> ApiError:
    """The answer to any exception; a bug is logged with its traceback and answered with 500."""
    known = as_api_error(error)
    if known is None:
        logger.error("a request failed", exc_info=error)
        return internal_error(error)
    return known


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
