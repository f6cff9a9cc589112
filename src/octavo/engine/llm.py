"""Offline inference: `LLM.generate` and `LLM.chat` drive the engine in this process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from octavo.core.sampling_params import SamplingParams
from octavo.engine.answers import Answer, Part, check_prompt, tokenize_bad_words
from octavo.engine.config import EngineConfig
from octavo.engine.embedding import EmbeddingInputs, check_dimensions, cut, embedding_request
from octavo.engine.factory import AnyEngine, build_engine
from octavo.engine.messages import EngineOutput, EngineRequest
from octavo.engine.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from octavo.engine.tokenizer import load_tokenizer, plain_messages, render_chat
from octavo.errors import EngineDeadError, UserError
from octavo.progress import Progress

Prompt = str | list[int] | dict[str, Any]
# Steps' worth of prompts that wait before the first step is launched: enough to fill it although the prefix cache holds
# a part of them. The rest is added while the device works.
STEPS_QUEUED = 2


class LLM:
    """A model, loaded and ready to answer.

    `model` is a directory, a .gguf file, a Hugging Face id or "demo"; the keyword arguments are the fields of
    `octavo.engine.config.EngineConfig`. Usable as a context manager; `shutdown()` frees the memory.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        config = EngineConfig.from_kwargs(model=str(model), **kwargs)
        # the tokenizer first: that it is missing should not be found after minutes of reading weights
        self._tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.model, config.tokenizer)
        self._engine: AnyEngine | None = build_engine(config)
        self._names = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one prompt or several; the results come in the prompts' order.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. `sampling_params` is one
        for all or one a prompt. A wrong prompt is a UserError before any is answered.
        """
        if not self.engine.info.can_generate:
            raise UserError(f"{self.engine.info.model} makes embeddings only: call embed")
        listed = _list_prompts(prompts)
        params = _list_params(sampling_params, len(listed))
        requests = [self._parse(prompt, p) for prompt, p in zip(listed, params, strict=True)]
        answers = [
            Answer(str(next(self._names)), text, ids, p, self._tokenizer)
            for (text, ids), p in zip(requests, params, strict=True)
        ]
        return self._run(answers, use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, given as lists of {"role", "content"}.

        A content is a text or a list of parts {"type": "text", "text": ...}. Raises UserError for other messages.
        """
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = render_chat(
                self.get_tokenizer(),
                plain_messages(conversation),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            ids = self.get_tokenizer().encode(text, add_special_tokens=False, verbose=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt, in the prompts' order; prompts as in `generate`.

        `dimensions` cuts the vectors of a model that was trained for it, `truncate_prompt_tokens` the inputs (-1: to
        what the model takes; one that is too long is a UserError otherwise). `prompt_name` names one of the texts that
        the model has to put before inputs, "query" for instance.
        """
        info = self.engine.info
        if info.embedding is None:
            raise UserError(f"{info.model} makes no embeddings: it was loaded with runner='generate'")
        check_dimensions(dimensions, info.embedding, info.model)
        requests = self._embedding_requests(_list_prompts(prompts), truncate_prompt_tokens, prompt_name)
        found = self._run_embedding(requests, use_tqdm)
        results = []
        for request in requests:
            output = found[request.request_id]
            vector = cut(np.frombuffer(output.embedding or b"", np.float32), dimensions, info.embedding)
            result = EmbeddingOutput(vector.tolist())
            results.append(
                EmbeddingRequestOutput(
                    request.request_id, result, request.prompt_token_ids, num_cached_tokens=output.num_cached_tokens
                )
            )
        return results

    def _embedding_requests(
        self, prompts: list[Prompt], keep: int | None, prompt_name: str | None
    ) -> list[EngineRequest]:
        inputs = EmbeddingInputs(self.engine.info, self._tokenizer)
        texts = [_text_of(prompt) for prompt in prompts]
        given = [text for text in texts if text is not None]
        encoded = iter(inputs.encode(given, prompt_name) if given else [])
        requests = []
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            ids = next(encoded) if text is not None else _ids_of(prompt)
            ids = inputs.fit(ids, keep, f"prompts[{i}]", is_text=text is not None)
            requests.append(embedding_request(str(next(self._names)), ids))
        return requests

    def _run_embedding(self, requests: list[EngineRequest], use_tqdm: bool) -> dict[str, EngineOutput]:
        """The last output of each request, by its id. Inputs of like length are computed together."""
        engine = self.engine
        waiting = {request.request_id for request in requests}
        found: dict[str, EngineOutput] = {}
        try:
            for request in sorted(requests, key=lambda request: len(request.prompt_token_ids)):
                engine.add(request)
            with Progress(len(requests), "embedding", enabled=use_tqdm) as progress:
                while waiting:
                    for output in engine.step():
                        if output.error is not None:
                            raise EngineDeadError(f"request {output.request_id} failed: {output.error}")
                        found[output.request_id] = output
                        waiting.discard(output.request_id)
                        progress.advance()
        finally:
            for name in waiting:
                engine.abort(name)
            engine.drain()
        return found

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer. Raises UserError with skip_tokenizer_init=True."""
        if self._tokenizer is None:
            raise UserError("the model was loaded with skip_tokenizer_init=True; prompts must be token ids")
        return self._tokenizer

    @property
    def engine(self) -> AnyEngine:
        """The engine. Raises EngineDeadError after shutdown()."""
        if self._engine is None:
            raise EngineDeadError("this LLM was shut down; create a new one")
        return self._engine

    def shutdown(self) -> None:
        """Free the model and the KV cache. Calling it twice is fine."""
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _parse(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        """Text (when known) and token ids of a prompt."""
        text, ids = prompt if isinstance(prompt, str) else None, prompt if isinstance(prompt, list) else None
        if isinstance(prompt, dict):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is None:
            if not isinstance(text, str):
                raise UserError(f"a prompt is {prompt!r}; it must be text, token ids, or a dict with one of them")
            ids = self.get_tokenizer().encode(text, verbose=False)  # check_prompt says it better
        ids = params.truncate(list(ids), self.engine.info.max_model_len)
        check_prompt(ids, self.engine.info.max_model_len)
        return text, ids

    def _run(self, answers: list[Answer], use_tqdm: bool) -> list[RequestOutput]:
        engine = self.engine
        waiting = {part.request_id: (answer, part) for answer in answers for part in answer.parts}
        new = deque(waiting.values())
        try:
            self._add(new, STEPS_QUEUED * engine.info.max_num_batched_tokens)
            with Progress(len(waiting), "generating", enabled=use_tqdm) as progress:
                while waiting:
                    outputs = engine.step()
                    self._add(new)
                    for output in outputs:
                        answer, part = waiting[output.request_id]
                        if output.error is not None:
                            raise EngineDeadError(f"request {output.request_id} failed: {output.error}")
                        if answer.accept(part, output):
                            engine.finish(output.request_id, part.stop_reason)
                        if part.finish_reason is not None:
                            del waiting[output.request_id]
                            progress.advance()
        finally:
            for name in waiting:  # an error or Ctrl-C: the requests that still run would haunt the next call
                engine.abort(name)
            engine.drain()  # a step that was launched ahead has nobody to bring its tokens to
        return [answer.result() for answer in answers]

    def _add(self, new: deque[tuple[Answer, Part]], num_tokens: float = float("inf")) -> None:
        """Give the engine requests from the front of `new`, until their prompts have `num_tokens` tokens."""
        while new and num_tokens > 0:
            answer, part = new.popleft()
            bad_words = tokenize_bad_words(self._tokenizer, part.params)
            self.engine.add(EngineRequest(part.request_id, answer.prompt_token_ids, part.params, bad_words=bad_words))
            num_tokens -= len(answer.prompt_token_ids)


def _text_of(prompt: Prompt) -> str | None:
    """The text of a prompt, None where it is token ids."""
    if isinstance(prompt, dict) and prompt.get("prompt_token_ids") is None:
        prompt = prompt.get("prompt", prompt)
    if isinstance(prompt, str):
        return prompt
    _ids_of(prompt)
    return None


def _ids_of(prompt: Prompt) -> list[int]:
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UserError(f"a prompt is {prompt!r}; it must be text, token ids, or a dict with one of them")
    return ids


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise UserError(f"prompts is {prompts!r}; it must be a prompt or a list of prompts", param="prompts")
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def _list_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise UserError(f"there are {len(params)} sampling_params for {count} prompts; give one, or one a prompt")
    return list(params)
