"""A small HTTP/1.1 client on asyncio protocols, made for streams of thousands of chunks a second.

httpx spends more time on a chunk than a small server spends on making it (`benchmarks/bench_client.py` measures it):
a load generator on it measures itself. Here the time is taken first thing when the socket has data, and one pass over
the bytes undoes the chunked encoding. Only what streaming JSON APIs need is there: no proxies, no redirects, no
compression, HTTP/1.1 alone.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from urllib.parse import urlsplit

from octavo.errors import UserError

MAX_HEAD_BYTES = 65536
BodySink = Callable[[int, bytes], None]


class RequestError(Exception):
    """No usable answer came. `kind` is connect, timeout, disconnect, protocol, http, stream or empty."""

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


class ResponseReader:
    """Reads one response incrementally: `feed` takes what the socket gave and returns the body bytes in it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keep_alive = True
        self.is_complete = False
        self._state = "head"  # head | size | data | trailer (chunked), length, until-close
        self._buffer = b""
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """The decoded body bytes inside `data`. Raises RequestError("protocol") on malformed input."""
        if self._state == "head":
            data = self._read_head(data)
        if self.is_complete or not data:
            return b""
        if self._state == "length":
            body, self._left = data[: self._left], self._left - len(data)
            self.is_complete = self._left <= 0
            return body
        if self._state == "until-close":
            return data
        return self._read_chunks(data)

    def at_close(self) -> bool:
        """Tell the reader that the connection closed; returns whether that was this response's proper end."""
        if self._state == "until-close":
            self.is_complete = True
        return self.is_complete

    def _read_head(self, data: bytes) -> bytes:
        self._buffer += data
        while True:
            head, separator, rest = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise RequestError("protocol", f"response head is longer than {MAX_HEAD_BYTES} bytes")
                return b""
            self._parse_head(head)
            self._buffer = rest
            if self.status >= 200:
                break
        self._buffer = b""
        return rest

    def _parse_head(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
            raise RequestError("protocol", f"not an HTTP/1 status line: {lines[0][:80]!r}")
        self.status = int(parts[1])
        if self.status < 200:
            return  # interim: it has no body, and the real head follows
        self.headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = "close" not in connection and (parts[0] != "HTTP/1.0" or "keep-alive" in connection)
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._state = "size"
        elif "content-length" in self.headers:
            length = self.headers["content-length"]
            if not length.isdigit():
                raise RequestError("protocol", f"not a content length: {length[:40]!r}")
            self._state, self._left = "length", int(length)
            self.is_complete = self._left == 0
        elif self.status in (204, 304):
            self.is_complete = True
        else:
            self._state, self.keep_alive = "until-close", False

    def _read_chunks(self, data: bytes) -> bytes:
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        position, end, pieces = 0, len(data), []
        while position < end:
            if self._state == "data":
                piece = data[position : position + self._left]
                position += len(piece)
                self._left -= len(piece)
                pieces.append(piece if self._left >= 2 else piece[: len(piece) - (2 - self._left)])
                if self._left == 0:
                    self._state = "size"
                continue
            newline = data.find(b"\r\n", position)
            if newline < 0:
                self._buffer = data[position:]
                break
            line, position = data[position:newline], newline + 2
            if self._state == "trailer":
                if not line:
                    self.is_complete = True
                    break
            else:
                self._start_chunk(line)
        return b"".join(pieces)

    def _start_chunk(self, line: bytes) -> None:
        try:
            size = int(line.split(b";", 1)[0], 16)
        except ValueError:
            raise RequestError("protocol", f"not a chunk size: {line[:40]!r}") from None
        if size == 0:
            self._state = "trailer"
        else:
            self._state, self._left = "data", size + 2  # the CRLF behind the chunk is part of what is left


@dataclass
class Response:
    """A finished answer. `first_byte_ns` is when its first byte arrived (perf_counter_ns)."""

    status: int
    headers: dict[str, str]
    first_byte_ns: int
    body: bytes


@dataclass
class _Exchange:
    """One request on one connection; `done` resolves when the response is complete."""

    done: asyncio.Future[None]
    sink: BodySink | None
    reader: ResponseReader = field(default_factory=ResponseReader)
    first_byte_ns: int = 0
    collected: list[bytes] = field(default_factory=list)

    def receive(self, now: int, data: bytes) -> None:
        if not self.first_byte_ns:
            self.first_byte_ns = now
        body = self.reader.feed(data)
        if body:
            if self.sink is not None and self.reader.status == 200:
                self.sink(now, body)
            else:
                self.collected.append(body)


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.exchange: _Exchange | None = None
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        now = perf_counter_ns()
        exchange = self.exchange
        if exchange is None or exchange.done.done():
            self.close()  # bytes that nobody asked for: the connection is of no further use
            return
        try:
            exchange.receive(now, data)
        except RequestError as error:
            exchange.done.set_exception(error)
            self.close()
            return
        if exchange.reader.is_complete:
            exchange.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        exchange = self.exchange
        if exchange is None or exchange.done.done():
            return
        if exchange.reader.at_close():
            exchange.done.set_result(None)
        else:
            reason = f": {exc}" if exc else ""
            exchange.done.set_exception(RequestError("disconnect", f"the server closed the connection early{reason}"))

    def close(self) -> None:
        self.is_closed = True
        if self.transport is not None:
            self.transport.abort()


class HttpClient:
    """A pool of keep-alive connections to one server. Every connection carries one request at a time."""

    def __init__(self, base_url: str, *, connect_timeout: float = 10.0, headers: dict[str, str] | None = None) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise UserError(f"{base_url!r} is not a server's URL; give one such as http://127.0.0.1:8000")
        self._host, self._prefix = url.hostname, url.path.rstrip("/")
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._ssl else 80)
        self._connect_timeout = connect_timeout
        self._idle: deque[_Connection] = deque()
        self._head = f"Host: {url.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n"
        for name, value in (headers or {}).items():
            if "\r" in value or "\n" in value:
                raise UserError(f"the {name} header must be one line")
            self._head += f"{name}: {value}\r\n"

    async def request(
        self, method: str, path: str, body: bytes | None = None, sink: BodySink | None = None, timeout: float = 60.0
    ) -> Response:
        """Send one request and wait for the whole answer; a 200's body goes to `sink` as it arrives, when there is one.

        Raises RequestError (connect, timeout, disconnect, protocol). Cancelling closes the connection, which is how a
        server learns that nobody listens any more.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        message = head.encode("latin-1") + b"\r\n" + (body or b"")
        try:
            async with asyncio.timeout(timeout):
                while True:
                    connection, is_reused = await self._take()
                    try:
                        return await self._exchange(connection, message, sink)
                    except RequestError as error:
                        # The server may close a kept connection in the moment of its reuse, before it read anything.
                        untouched = connection.exchange is not None and not connection.exchange.first_byte_ns
                        if not (is_reused and error.kind == "disconnect" and untouched):
                            raise
        except TimeoutError:
            raise RequestError("timeout", f"no complete answer within {timeout:g} s") from None

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)

    async def _take(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return connection, True
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except TimeoutError:
            place = f"{self._host}:{self._port}"
            raise RequestError("connect", f"no connection to {place} within {self._connect_timeout:g} s") from None
        except OSError as error:
            raise RequestError("connect", f"cannot connect to {self._host}:{self._port}: {error}") from None
        return connection, False

    async def _exchange(self, connection: _Connection, message: bytes, sink: BodySink | None) -> Response:
        exchange = _Exchange(asyncio.get_running_loop().create_future(), sink)
        connection.exchange = exchange
        assert connection.transport is not None
        connection.transport.write(message)
        try:
            await exchange.done
        except BaseException:
            connection.close()
            raise
        if exchange.reader.keep_alive and not connection.is_closed:
            self._idle.append(connection)
        else:
            connection.close()
        reader = exchange.reader
        return Response(reader.status, reader.headers, exchange.first_byte_ns, b"".join(exchange.collected))
