"""Collects the engine's outputs of one request (with its `n` parts) into a RequestOutput."""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.messages import EngineOutput
from octavo.engine.outputs import CompletionOutput, Logprobs, RequestOutput
from octavo.errors import UserError


def check_prompt(token_ids: list[int], max_model_len: int) -> None:
    """Raise UserError for a prompt that is empty or leaves no room for an answer."""
    if not token_ids:
        raise UserError("the prompt is empty; it must hold at least one token", param="prompt")
    if len(token_ids) >= max_model_len:
        raise UserError(
            f"the prompt has {len(token_ids)} tokens; the context of {max_model_len} must hold it and at least one new "
            f"token. Shorten the prompt to at most {max_model_len - 1} tokens or raise max_model_len",
            param="prompt",
        )


def tokenize_bad_words(tokenizer: Any, params: SamplingParams) -> list[list[int]]:
    """Token sequences of `params.bad_words`, each at the start of a text and after a space."""
    if not params.bad_words:
        return []
    if tokenizer is None:
        raise UserError("bad_words needs a tokenizer, which skip_tokenizer_init=True left out", param="bad_words")
    sequences: list[list[int]] = []
    for word in params.bad_words:
        for text in (word, " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences


def split_params(params: SamplingParams) -> list[SamplingParams]:
    """One set of parameters for each of the `n` answers; with a seed, answer i uses seed + i."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else params.seed + i for i in range(params.n)]
    return [dataclasses.replace(params, n=1, seed=seed) for seed in seeds]


class Part:
    """One of the `n` answers while it grows."""

    def __init__(self, request_id: str, params: SamplingParams, prompt_token_ids: list[int], tokenizer: Any) -> None:
        self.request_id = request_id
        self.params = params
        wants_text = tokenizer is not None and params.detokenize
        self.detokenizer = Detokenizer(tokenizer, prompt_token_ids, params) if wants_text else None
        if params.stop and self.detokenizer is None:
            raise UserError("stop strings need a tokenizer and detokenize=True; use stop_token_ids", param="stop")
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def accept(self, output: EngineOutput) -> bool:
        """Add an output; True when a stop string ended the answer and the engine does not know yet."""
        self.token_ids += output.token_ids
        if self.logprobs is not None and output.logprobs:
            self.logprobs += output.logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if self.detokenizer is None:
            return False
        visible = output.token_ids
        if output.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            visible = visible[:-1]  # the token that ended the answer is not part of its text
        self.detokenizer.append(visible, last=output.finish_reason is not None)
        if not self.detokenizer.finished:
            return False
        is_news = self.finish_reason is None
        self.finish_reason, self.stop_reason = "stop", self.detokenizer.stop_reason
        return is_news

    def result(self, index: int) -> CompletionOutput:
        total = None
        if self.logprobs is not None:
            total = sum(entry[t].logprob for t, entry in zip(self.token_ids, self.logprobs, strict=True))
        text = self.detokenizer.text if self.detokenizer else ""
        return CompletionOutput(index, text, self.token_ids, total, self.logprobs, self.finish_reason, self.stop_reason)


class Answer:
    """A request of the caller: the prompt and its `n` parts."""

    def __init__(
        self, request_id: str, prompt: str | None, token_ids: list[int], params: SamplingParams, tokenizer: Any
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = token_ids
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[Logprobs | None] | None = None
        self._num_cached_tokens = 0
        names = [request_id] if params.n == 1 else [f"{request_id}-{i}" for i in range(params.n)]
        self.parts = [Part(n, p, token_ids, tokenizer) for n, p in zip(names, split_params(params), strict=True)]

    def accept(self, part: Part, output: EngineOutput) -> bool:
        """Add an output to a part; True when the engine must be told that a stop string ended it."""
        if part is self.parts[0]:
            self._num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                self._prompt_logprobs = output.prompt_logprobs
        return part.accept(output)

    def result(self) -> RequestOutput:
        outputs = [part.result(i) for i, part in enumerate(self.parts)]
        for entries in (self._prompt_logprobs, *(o.logprobs for o in outputs)):
            name_tokens(self._tokenizer, entries)
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            self._prompt_logprobs,
            outputs,
            finished=True,
            num_cached_tokens=self._num_cached_tokens,
        )


def name_tokens(tokenizer: Any, entries: list[Logprobs | None] | list[Logprobs] | None) -> None:
    """Fill in `decoded_token` of log-probability entries in place."""
    if tokenizer is None or not entries:
        return
    ids = sorted({token for entry in entries if entry for token in entry})
    texts = dict(zip(ids, tokenizer.batch_decode([[t] for t in ids]), strict=True))
    for entry in entries:
        for token, logprob in (entry or {}).items():
            logprob.decoded_token = texts[token]
