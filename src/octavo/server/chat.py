"""`/v1/chat/completions`: messages to a prompt, tokens to messages or to a stream of deltas."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.server.errors import bad_request
from octavo.server.generation import Delta, Job
from octavo.server.logprobs import LogprobFormatter
from octavo.server.parse import Parsed
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.replies import EventStream, EventTemplate, JsonReply, LateReply, event
from octavo.server.state import FINGERPRINT, ServerState
from octavo.server.usage import StreamUsage, UsageMeter


async def chat_completions(state: ServerState, parsed: Parsed[ChatCompletionRequest], request_id: str) -> LateReply:
    """Answer a chat request. What is wrong with it is raised here, before anything is queued."""
    request = parsed.request
    model = state.check_model(request.model)
    _check(request, state)
    answer_id = state.answer_id("chatcmpl", request, request_id)
    state.admission.check(request.n or 1)  # before the work of tokenizing; `run` checks again
    prompt, prompt_ids, unused = await encode_chat(state, request)
    parsed.ignored += unused
    params = _params(state, request, len(prompt_ids))
    jobs = state.jobs(answer_id, request, [prompt_ids], [params])
    answer = _ChatAnswer(state, request, model, answer_id, prompt, prompt_ids)
    if request.stream:
        return EventStream(answer.stream(jobs), parsed.headers())
    return JsonReply(answer.whole(jobs), parsed.headers())


async def encode_chat(state: ServerState, request: ChatCompletionRequest) -> tuple[str, list[int], list[str]]:
    """Prompt text, its tokens, and the template variables that the template does not use."""
    prompt, unused = state.need_chat().render(request)
    codec = state.need_codec("messages")
    ids = await codec.encode(prompt, add_special_tokens=bool(request.add_special_tokens))
    ids = state.params.truncate(ids, request.truncate_prompt_tokens, request.truncation_side)
    if not ids:
        raise bad_request("the chat template made an empty prompt of the messages", "messages")
    return prompt, ids, unused


def _check(request: ChatCompletionRequest, state: ServerState) -> None:
    _check_tools(request)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    if request.top_logprobs and not request.logprobs:
        raise bad_request(f"top_logprobs is {request.top_logprobs}; it needs logprobs to be true", "top_logprobs")
    bound = state.config.max_logprobs
    if request.top_logprobs is not None and not (bound == -1 or 0 <= request.top_logprobs <= bound):
        raise bad_request(
            f"top_logprobs is {request.top_logprobs}; it must be 0 to {bound} (--max-logprobs)", "top_logprobs"
        )
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs is not available in a stream; set stream to false", "prompt_logprobs")


def _check_tools(request: ChatCompletionRequest) -> None:
    """Tools may be shown to the model, but calls are not parsed: with tools, only tool_choice "none" is honest."""
    allowed = ("none",) if request.tools else (None, "none", "auto")
    if request.tool_choice not in allowed:
        raise bad_request(
            'tool calls are not parsed yet: leave out tools, or set tool_choice to "none" to show them to the model',
            "tools" if request.tools else "tool_choice",
        )


def _params(state: ServerState, request: ChatCompletionRequest, prompt_len: int) -> SamplingParams:
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    requested = state.params.requested_tokens(getattr(request, name), name, default=None)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = state.params.build(request, logprobs=logprobs, prompt_logprobs=request.prompt_logprobs)
    return state.params.fit(params, prompt_len, requested)


class _ChatAnswer:
    """Shapes the deltas of one request as OpenAI does."""

    def __init__(
        self,
        state: ServerState,
        request: ChatCompletionRequest,
        model: str,
        answer_id: str,
        prompt: str,
        prompt_ids: list[int],
    ) -> None:
        self._state = state
        self._request = request
        self._prompt = prompt
        self._prompt_ids = prompt_ids
        self._formatter = LogprobFormatter(state.codec, as_ids=bool(request.return_tokens_as_token_ids))
        self._usage = UsageMeter(len(prompt_ids), with_details=state.config.enable_prompt_tokens_details)
        last = request.messages[-1]
        continues = request.add_generation_prompt is False or request.continue_final_message
        self._role = last["role"] if continues else state.config.response_role
        same_role = request.echo and last["role"] == self._role
        self._echo = last["content"] if same_role and isinstance(last.get("content"), str) else ""
        self._head = {"id": answer_id, "created": int(time.time()), "model": model, "system_fingerprint": FINGERPRINT}

    async def whole(self, jobs: list[Job]) -> dict[str, Any]:
        choices = [self._empty_choice(job.index) for job in jobs]
        extra: dict[str, Any] = {}
        async with aclosing(self._state.generator.run(jobs)) as deltas:
            async for delta in deltas:
                self._usage.add(delta, 0)
                self._extend(choices[delta.index], delta)
                if delta.prompt_logprobs is not None:
                    extra["prompt_logprobs"] = self._formatter.prompt(delta.prompt_logprobs)
        if self._request.return_token_ids:
            extra["prompt_token_ids"] = self._prompt_ids
        if self._request.return_prompt_text:
            extra["prompt_text"] = self._prompt
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage.json(), **extra}

    async def stream(self, jobs: list[Job]) -> AsyncGenerator[bytes, None]:
        usage = StreamUsage(self._request, self._state.config)
        has_role: set[int] = set()
        templates: dict[int, EventTemplate] = {}  # choice -> its chunks that have a text and nothing else
        is_plain = not (self._request.logprobs or self._request.return_token_ids or usage.always)
        async with aclosing(self._state.generator.run(jobs)) as deltas:
            async for delta in deltas:
                self._usage.add(delta, 0)
                if delta.index not in has_role:
                    has_role.add(delta.index)
                    yield self._chunk(
                        delta.index, {"role": self._role, "content": ""}, None, usage, first=len(has_role) == 1
                    )
                    if self._echo:
                        yield self._chunk(delta.index, {"content": self._echo}, None, usage)
                if is_plain and delta.finish_reason is None:
                    template = templates.get(delta.index)
                    if template is None:
                        template = templates[delta.index] = self._template(delta.index)
                    yield template.event(delta.text)
                else:
                    yield self._chunk(delta.index, {"content": delta.text}, delta, usage)
        if usage.at_end:
            yield event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage.json()})

    def _template(self, index: int) -> EventTemplate:
        choice = {"index": index, "logprobs": None, "finish_reason": None}
        head = {**self._head, "object": "chat.completion.chunk"}
        return EventTemplate(lambda text: {**head, "choices": [{**choice, "delta": {"content": text}}]})

    def _chunk(
        self, index: int, content: dict[str, str], delta: Delta | None, usage: StreamUsage, *, first: bool = False
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": content, "logprobs": None, "finish_reason": None}
        if delta is not None:
            choice["logprobs"] = self._logprobs(delta)
            if self._request.return_token_ids:
                choice["token_ids"] = delta.token_ids
            if delta.finish_reason is not None:
                choice["finish_reason"] = delta.finish_reason
                choice["stop_reason"] = delta.stop_reason
        chunk: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if usage.always:
            chunk["usage"] = self._usage.json()
        if first and self._request.return_token_ids:
            chunk["prompt_token_ids"] = self._prompt_ids
        if first and self._request.return_prompt_text:
            chunk["prompt_text"] = self._prompt
        return event(chunk)

    def _empty_choice(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": self._role, "content": self._echo, "refusal": None},
        }
        choice |= {
            "logprobs": {"content": []} if self._request.logprobs else None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = []
        return choice

    def _extend(self, choice: dict[str, Any], delta: Delta) -> None:
        choice["message"]["content"] += delta.text
        logprobs = self._logprobs(delta)
        if logprobs is not None:
            choice["logprobs"]["content"] += logprobs["content"]
        if self._request.return_token_ids:
            choice["token_ids"] += delta.token_ids
        if delta.finish_reason is not None:
            choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._request.logprobs or delta.logprobs is None:
            return None
        return self._formatter.chat(delta.token_ids, delta.logprobs, self._request.top_logprobs or 0)
