"""What happens to every HTTP request before its route: the request id, the API key, the count.

Plain ASGI: a wrapper around `send` costs a stream's chunks next to nothing.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from octavo.server.auth import KeyRing
from octavo.server.errors import ApiError
from octavo.server.metrics import ServerMetrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")
_UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})


class Gate:
    """Lets a request pass to `app` when it may, with `scope["state"]["request_id"]` set.

    The id is the client's X-Request-Id when it sends a sane one (1 to 256 printable characters without spaces), else a
    fresh one; the answer carries it too.
    """

    def __init__(self, app: App, keys: KeyRing, metrics: ServerMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope["headers"])
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode("ascii")
        state["send_body"] = send  # for the parts of a stream: whatever wraps `send` further in looks at its start only
        status = 500

        async def send_marked(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            await send(message)

        try:
            if self._keys.admits(scope["path"], scope["headers"]):
                await self._app(scope, receive, send_marked)
            else:
                await _refuse(send_marked)
        finally:
            self._count(scope, status)

    def _count(self, scope: Scope, status: int) -> None:
        route = scope.get("route")  # set by the router; anything else would make a label of what clients type
        path = getattr(route, "path", "none")
        if path not in _UNCOUNTED:
            self._metrics.http_requests.labels(path, scope["method"], f"{status // 100}xx").inc()


async def _refuse(send: Send) -> None:
    error = ApiError(
        401,
        "the API key is missing or wrong; send 'Authorization: Bearer KEY' with a key that the server was started with",
        code="invalid_api_key",
    )
    response = error.response()
    response.headers["www-authenticate"] = "Bearer"
    await send({"type": "http.response.start", "status": 401, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex.encode()
