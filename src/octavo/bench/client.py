"""An OpenAI-compatible server as a load generator sees it: make a body, stream the answer, note each chunk's time."""

from __future__ import annotations

import asyncio
import json
from time import perf_counter_ns
from typing import Any

import msgspec

from octavo.bench.config import BenchConfig
from octavo.bench.http1 import HttpClient, RequestError, Response
from octavo.bench.records import RequestRecord
from octavo.bench.workload import Prompt
from octavo.errors import OctavoError

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
FAILURE_KINDS = {
    "connect": "no connection",
    "timeout": "no complete answer in time",
    "disconnect": "the connection closed before the answer ended",
    "protocol": "the answer was not valid HTTP, SSE or JSON",
    "http": "an error status",
    "stream": "an error object inside the stream",
    "empty": "the answer brought no token",
}


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class StreamSink:
    """Turns the bytes of a server-sent-event stream into token times and counts of one record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._tail = b""
        self._counted = 0  # completion tokens by the server's own running count
        self.num_chunks = 0
        self.is_done = False
        self.finish_reason: str | None = None

    def __call__(self, now: int, data: bytes) -> None:
        """Take body bytes that arrived at `now`. Raises RequestError ("stream" or "protocol")."""
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # blank separators, comments, event names
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.is_done = True
            elif payload:
                self._take(now, payload)

    def _take(self, now: int, payload: bytes) -> None:
        try:
            chunk = _decode_chunk(payload)
        except msgspec.MsgspecError as error:
            raise RequestError("protocol", f"a chunk is not the expected JSON ({error}): {payload[:80]!r}") from None
        if chunk.error is not None:
            message = chunk.error.get("message") if isinstance(chunk.error, dict) else chunk.error
            raise RequestError("stream", str(message))
        has_token = False
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            delta = choice.delta
            if choice.text or (
                delta and (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
            ):
                has_token = True
        usage = chunk.usage
        if usage is not None and usage.completion_tokens is not None:
            if chunk.choices and usage.completion_tokens > 0:
                # The running count knows better than the text: half a UTF-8 character is a token without text, and what
                # the detokenizer held back may come as text without a token.
                has_token = usage.completion_tokens > self._counted
            self._counted = max(self._counted, usage.completion_tokens)
            self._note_usage(usage)
        if has_token:
            self.num_chunks += 1
            self._record.token_ns.append(now)
            if not self._record.has_usage:
                self._record.output_tokens = self.num_chunks

    def _note_usage(self, usage: _Usage) -> None:
        record = self._record
        record.has_usage = True
        record.output_tokens = usage.completion_tokens or 0
        record.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens


class LoadClient:
    """Sends the load's requests and keeps the record of each."""

    def __init__(self, config: BenchConfig, http: HttpClient) -> None:
        self.http = http
        self.model = config.model or ""
        self._config = config
        self._route = ROUTES[config.request_format]
        self._stream_options: dict[str, bool] = {"include_usage": True, "continuous_usage_stats": True}

    def body(self, prompt: Prompt) -> bytes:
        """The JSON body of one request."""
        config = self._config
        fields: dict[str, Any] = {"model": self.model, "stream": True, "temperature": config.temperature}
        fields["stream_options"] = self._stream_options
        if config.request_format == "chat":
            fields["messages"] = prompt.messages()
            limit = "max_completion_tokens"
        else:
            fields["prompt"] = prompt.content
            limit = "max_tokens"
        if prompt.output_tokens is not None:
            fields[limit] = prompt.output_tokens
            if config.ignore_eos:
                fields["ignore_eos"] = True
        return msgspec.json.encode(fields)

    async def send(self, prompt: Prompt, body: bytes, record: RequestRecord) -> None:
        """Send one prepared request and fill its record; whatever goes wrong is noted there, never raised.

        Cancellation closes the connection, leaves the status "cancelled" and goes on upwards.
        """
        record.requested_prompt, record.requested_output = prompt.num_tokens, prompt.output_tokens
        record.is_repeated_prompt = prompt.is_repeated
        sink = StreamSink(record)
        record.sent_ns = perf_counter_ns()
        try:
            response = await self.http.request("POST", self._route, body, sink, self._config.timeout)
            record.end_ns = perf_counter_ns()
            record.first_byte_ns = response.first_byte_ns
            self._judge(response, sink, record)
            record.status = "completed"
        except RequestError as error:
            record.end_ns = perf_counter_ns()
            record.status, record.error = "failed", str(error)
            record.error_kind = f"http_{error.status}" if error.status else error.kind
        except asyncio.CancelledError:
            record.end_ns = perf_counter_ns()
            raise

    @staticmethod
    def _judge(response: Response, sink: StreamSink, record: RequestRecord) -> None:
        if response.status != 200:
            raise RequestError("http", _error_text(response), status=response.status)
        if not sink.is_done and sink.finish_reason is None:
            raise RequestError("disconnect", "the stream ended without a finish reason or [DONE]")
        if not record.token_ns:
            raise RequestError("empty", f"no token came (finish reason {sink.finish_reason!r})")

    async def connect(self) -> str:
        """Find the model's name when none was given. Returns it; raises OctavoError when the server does not answer."""
        if self.model:
            return self.model
        payload = await self.get_json("/v1/models")
        try:
            self.model = str(payload["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise OctavoError(f"{self._config.base_url()}/v1/models lists no model; name one with --model") from None
        return self.model

    async def preflight(self, prompt: Prompt) -> RequestRecord:
        """One unmeasured request: it warms the route up and shows early whether the server can be measured at all.

        A server that does not know `continuous_usage_stats` is asked again without it. Raises OctavoError.
        """
        record = await self._try(prompt)
        if record.error_kind in ("http_400", "http_422"):
            first_error = record.error
            self._stream_options = {"include_usage": True}
            record = await self._try(prompt)
            if record.status == "failed":
                record.error = first_error
        if record.status == "failed":
            hint = "; a server without `ignore_eos` needs --no-ignore-eos" if self._may_lack_ignore_eos(record) else ""
            kind = FAILURE_KINDS.get(record.error_kind or "", f"status {(record.error_kind or '')[5:]}")
            raise OctavoError(f"the first request to {self._config.base_url()} failed ({kind}): {record.error}{hint}")
        return record

    def _may_lack_ignore_eos(self, record: RequestRecord) -> bool:
        return self._config.ignore_eos and record.error_kind in ("http_400", "http_422")

    async def _try(self, prompt: Prompt) -> RequestRecord:
        record = RequestRecord(index=-1, scheduled_ns=perf_counter_ns())
        await self.send(prompt, self.body(prompt), record)
        return record

    async def get_json(self, path: str, body: dict[str, Any] | None = None, timeout: float = 30.0) -> Any:
        """GET (or POST `body`) and decode JSON. Raises OctavoError that names the address and what came back."""
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        address = self._config.base_url() + path
        try:
            response = await self.http.request(method, path, data, timeout=timeout)
        except RequestError as error:
            raise OctavoError(f"{address} does not answer: {error}") from None
        if response.status != 200:
            raise OctavoError(f"{address} answered {response.status}: {_error_text(response)}")
        try:
            return json.loads(response.body)
        except ValueError:
            raise OctavoError(f"{address} answered something other than JSON: {response.body[:80]!r}") from None


def _error_text(response: Response) -> str:
    """The message of an OpenAI error object, or the start of whatever else came."""
    try:
        payload = json.loads(response.body)
        error = payload.get("error", payload)
        return str(error["message"] if isinstance(error, dict) and "message" in error else error)[:300]
    except (ValueError, AttributeError):
        return response.body[:300].decode("utf-8", "replace")
