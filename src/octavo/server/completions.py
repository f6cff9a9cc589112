"""`/v1/completions`: prompts as text or token ids, with echo and log-probabilities as lm-eval and others read them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from octavo.server.errors import bad_request
from octavo.server.generation import Delta, Job
from octavo.server.logprobs import LogprobFormatter
from octavo.server.params import DEFAULT_COMPLETION_TOKENS
from octavo.server.parse import Parsed, shown
from octavo.server.protocol import CompletionRequest
from octavo.server.replies import EventStream, EventTemplate, JsonReply, LateReply, event
from octavo.server.state import FINGERPRINT, ServerState
from octavo.server.usage import StreamUsage, UsageMeter


@dataclass(slots=True)
class Prompt:
    """`text` is None when the client sent token ids."""

    text: str | None
    ids: list[int]


async def completions(state: ServerState, parsed: Parsed[CompletionRequest], request_id: str) -> LateReply:
    """Answer a completion request. What is wrong with it is raised here, before anything is queued."""
    request = parsed.request
    model = state.check_model(request.model)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs is not available in a stream; set stream to false", "prompt_logprobs")
    answer_id = state.answer_id("cmpl", request, request_id)
    requested = state.params.requested_tokens(
        request.max_tokens, "max_tokens", default=DEFAULT_COMPLETION_TOKENS, allow_zero=bool(request.echo)
    )
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    params = state.params.build(request, logprobs=request.logprobs, prompt_logprobs=prompt_logprobs)
    prompts = await encode_prompts(state, request)
    fitted = [state.params.fit(params, len(prompt.ids), requested or 1) for prompt in prompts]
    jobs = state.jobs(answer_id, request, [prompt.ids for prompt in prompts], fitted)
    answer = _CompletionAnswer(state, request, model, answer_id, prompts, echo_only=requested == 0)
    if request.stream:
        return EventStream(answer.stream(jobs), parsed.headers())
    return JsonReply(answer.whole(jobs), parsed.headers())


async def encode_prompts(state: ServerState, request: CompletionRequest) -> list[Prompt]:
    """The prompts in tokens; ApiError 400 names what is wrong with which."""
    items = list_prompts(request.prompt)
    limit = state.config.max_prompts
    if len(items) > limit:
        raise bad_request(
            f"prompt has {len(items)} prompts; at most {limit} are allowed in a request (--max-prompts)", "prompt"
        )
    state.admission.check(len(items) * (request.n or 1))
    prompts = []
    for i, item in enumerate(items):
        where = "prompt" if len(items) == 1 else f"prompt[{i}]"
        if isinstance(item, str):
            special = request.add_special_tokens is not False
            ids = await state.need_codec("prompt").encode(item, add_special_tokens=special)
            prompt = Prompt(item, ids)
        else:
            prompt = Prompt(None, item)
        kept = state.params.truncate(prompt.ids, request.truncate_prompt_tokens, request.truncation_side)
        if len(kept) < len(prompt.ids):
            prompt = Prompt(None, kept)
        if not prompt.ids:
            raise bad_request(f"{where} is empty (0 tokens); it must have at least 1 token", "prompt")
        _check_ids(prompt.ids, state.params.vocab_size, where)
        prompts.append(prompt)
    return prompts


def list_prompts(prompt: Any, name: str = "prompt") -> list[str | list[int]]:
    """OpenAI's four shapes (text, texts, token ids, lists of token ids) as a list; `name` is the field, for errors."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise bad_request(f"{name} is {shown(prompt)}; it must be text, token ids, or a list of either", name)
    if not prompt:
        raise bad_request(f"{name} is an empty list; it must hold at least one {name} or token id", name)
    if _are_ids(prompt):
        return [prompt]
    for i, item in enumerate(prompt):
        if not isinstance(item, str) and not (isinstance(item, list) and _are_ids(item)):
            raise bad_request(f"{name}[{i}] is {shown(item)}; it must be text or a list of token ids", name)
    return prompt


def _are_ids(items: list[Any]) -> bool:
    return set(map(type, items)) <= {int}


def _check_ids(ids: list[int], vocab_size: int, where: str) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise bad_request(
            f"{where} holds the token id {low if low < 0 else high}; ids are 0 to {vocab_size - 1}", "prompt"
        )


class _CompletionAnswer:
    """Shapes the deltas of one request as OpenAI does. Choice i*n + j is answer j to prompt i."""

    def __init__(
        self,
        state: ServerState,
        request: CompletionRequest,
        model: str,
        answer_id: str,
        prompts: list[Prompt],
        *,
        echo_only: bool,
    ) -> None:
        self._state = state
        self._request = request
        self._prompts = prompts
        self._echo_only = echo_only
        self._num_samples = request.n or 1
        self._formatter = LogprobFormatter(state.codec, as_ids=bool(request.return_tokens_as_token_ids))
        self._usage = UsageMeter(
            sum(len(p.ids) for p in prompts), with_details=state.config.enable_prompt_tokens_details
        )
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._templates: dict[int, EventTemplate] = {}  # choice -> its chunks that have a text and nothing else
        self._offsets: dict[int, int] = {}  # choice -> length of the tokens' text so far
        self._prompt_logprobs: dict[int, Any] = {}  # prompt -> as the engine gave them

    async def whole(self, jobs: list[Job]) -> dict[str, Any]:
        choices = [self._choice(job.index) for job in jobs]
        gathered: list[list[Delta]] = [[] for _ in jobs]
        async with aclosing(self._state.generator.run(jobs)) as deltas:
            async for delta in deltas:
                self._note(delta)
                gathered[delta.index].append(delta)
        for choice, parts in zip(choices, gathered, strict=True):
            self._fill(choice, parts)
        return {**self._head, "choices": choices, "usage": self._usage.json()}

    async def stream(self, jobs: list[Job]) -> AsyncGenerator[bytes, None]:
        usage = StreamUsage(self._request, self._state.config)
        is_plain = self._is_plain(usage)
        begun: set[int] = set()
        waiting: dict[int, list[Delta]] = {}
        async with aclosing(self._state.generator.run(jobs)) as deltas:
            async for delta in deltas:
                self._note(delta)
                if is_plain and delta.finish_reason is None:
                    yield self._template(delta.index).event(delta.text)
                    continue
                if self._lacks_prompt(delta.index):
                    # An echo needs the prompt's logprobs, which its first sample brings.
                    waiting.setdefault(delta.index, []).append(delta)
                    continue
                ready = [delta.index, *(i for i in waiting if not self._lacks_prompt(i) and i != delta.index)]
                for index in ready:
                    for part in [*waiting.pop(index, []), *([delta] if index == delta.index else [])]:
                        yield self._chunk(part, usage, first=index not in begun)
                        begun.add(index)
        if usage.at_end:
            yield event({**self._head, "choices": [], "usage": self._usage.json()})

    def _is_plain(self, usage: StreamUsage) -> bool:
        """Whether the chunks of the stream, but for the last, differ in nothing but their text."""
        request = self._request
        return request.logprobs is None and not (
            request.echo or request.return_token_ids or request.return_prompt_text or usage.always
        )

    def _template(self, index: int) -> EventTemplate:
        template = self._templates.get(index)
        if template is None:
            choice = self._choice(index)
            template = EventTemplate(lambda text: {**self._head, "choices": [{**choice, "text": text}]})
            self._templates[index] = template
        return template

    def _note(self, delta: Delta) -> None:
        prompt_index = delta.index // self._num_samples
        self._usage.add(delta, prompt_index, num_tokens=0 if self._echo_only else None)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = delta.prompt_logprobs

    def _lacks_prompt(self, index: int) -> bool:
        wanted = self._request.echo and self._request.logprobs is not None
        return bool(wanted) and index // self._num_samples not in self._prompt_logprobs

    def _choice(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _fill(self, choice: dict[str, Any], parts: list[Delta]) -> None:
        """Everything of one choice, from all its deltas."""
        request, index = self._request, choice["index"]
        prompt_index = index // self._num_samples
        choice["text"] = self._echo_text(index) + ("" if self._echo_only else "".join(part.text for part in parts))
        choice["finish_reason"], choice["stop_reason"] = parts[-1].finish_reason, parts[-1].stop_reason
        token_ids = [] if self._echo_only else [t for part in parts for t in part.token_ids]
        if request.logprobs is not None:
            positions = [] if self._echo_only else [p for part in parts for p in part.logprobs or ()]
            choice["logprobs"] = self._logprobs(index, token_ids, positions, first=True)
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._formatter.prompt(self._prompt_logprobs[prompt_index])
        if request.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = self._prompts[prompt_index].ids
        if request.return_prompt_text:
            choice["prompt_text"] = self._prompt_text(prompt_index)

    def _chunk(self, delta: Delta, usage: StreamUsage, *, first: bool) -> bytes:
        request, choice = self._request, self._choice(delta.index)
        token_ids = [] if self._echo_only else delta.token_ids
        choice["text"] = (self._echo_text(delta.index) if first else "") + ("" if self._echo_only else delta.text)
        choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
        if request.logprobs is not None:
            positions = [] if self._echo_only else delta.logprobs or []
            choice["logprobs"] = self._logprobs(delta.index, token_ids, positions, first=first)
        if request.return_token_ids:
            choice["token_ids"] = token_ids
            if first:
                choice["prompt_token_ids"] = self._prompts[delta.index // self._num_samples].ids
        if request.return_prompt_text and first:
            choice["prompt_text"] = self._prompt_text(delta.index // self._num_samples)
        chunk = {**self._head, "choices": [choice]}
        if usage.always:
            chunk["usage"] = self._usage.json()
        return event(chunk)

    def _logprobs(self, index: int, token_ids: list[int], positions: list[Any], *, first: bool) -> dict[str, Any]:
        if first and self._request.echo:
            prompt_index = index // self._num_samples
            token_ids = [*self._prompts[prompt_index].ids, *token_ids]
            positions = [*self._prompt_logprobs[prompt_index], *positions]
        start = self._offsets.get(index, 0)
        result = self._formatter.completion(token_ids, positions, self._request.logprobs or 0, start)
        self._offsets[index] = start + sum(map(len, result["tokens"]))
        return result

    def _echo_text(self, index: int) -> str:
        return self._prompt_text(index // self._num_samples) if self._request.echo else ""

    def _prompt_text(self, prompt_index: int) -> str:
        prompt = self._prompts[prompt_index]
        if prompt.text is None and self._state.codec is not None:
            prompt.text = self._state.codec.decode(prompt.ids, skip_special_tokens=False)
        return prompt.text or ""
