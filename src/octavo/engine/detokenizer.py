"""Turns token ids into text one step at a time, and finds stop strings on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.core.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # what a decoder prints for bytes that are not (yet) a character
CONTEXT_TOKENS = 6  # tokens before the new one that a decoder may need to place spaces right
LONGEST_CHARACTER = 16  # tokens; an incomplete character that goes on for longer is garbage and is let through


class Detokenizer:
    """Incremental text of one answer.

    Decoding a token alone loses the spaces and the characters that span tokens, so each step decodes a short window
    with the new tokens, and emits what it has more than the window without them. Text that ends in an incomplete
    character, or that may still grow into a stop string, is held back.

    `text` is what was emitted so far. After a stop string, `finished` is True and `stop_reason` names it.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self._decode_ids = decoder_of(tokenizer)
        self._skip_special = params.skip_special_tokens
        self._stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held_length = max((len(s) for s in self._stops), default=1) - 1
        self._ids = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._num_context = len(self._ids)
        self._prefix_start = 0
        self._read = len(self._ids)
        self._before = self._text_of(self._ids)  # the text of the window, ids[prefix_start:read]
        self._decoded = ""
        self._emitted = 0
        self._num_new = 0
        self.finished = False
        self.stop_reason: str | None = None

    @property
    def text(self) -> str:
        return self._decoded[: self._emitted]

    def append(self, token_ids: list[int], *, last: bool = False) -> str:
        """Add tokens and return the text that became certain. `last` releases everything that was held back.

        Once a stop string was found, further tokens are ignored.
        """
        if self.finished:
            return ""
        for token in token_ids:
            self._ids.append(token)
            self._num_new += 1
            searched = max(0, len(self._decoded) - self._held_length)
            self._decode(flush=False)
            if self._stops and self._num_new > self._min_tokens and self._find_stop(searched):
                return self._emit(len(self._decoded))
        if last:
            self._decode(flush=True)
        if self._stops and not last:
            return self._emit(self._safe_length())
        return self._emit(len(self._decoded))

    def _decode(self, *, flush: bool) -> None:
        now, length = self._text_of(self._ids[self._prefix_start :]), len(self._before)
        is_waiting = len(now) <= length or now.endswith(REPLACEMENT)
        if is_waiting and not flush and len(self._ids) - self._read < LONGEST_CHARACTER:
            return
        self._decoded += now[length:]
        self._prefix_start = self._read
        self._read = len(self._ids)
        self._before = self._text_of(self._ids[self._prefix_start :])

    def _text_of(self, ids: list[int]) -> str:
        return self._decode_ids(ids, self._skip_special) if ids else ""

    def _find_stop(self, searched: int) -> bool:
        """Look for the stop string that ends first in the text after `searched`, and cut the text there."""
        found = [(self._decoded.find(s, searched), s) for s in self._stops]
        hits = [(at + len(s), at, s) for at, s in found if at >= 0]
        if not hits:
            return False
        end, start, self.stop_reason = min(hits)
        self._decoded = self._decoded[: end if self._include_stop else start]
        self.finished = True
        return True

    def _safe_length(self) -> int:
        """Length of the text without a tail that could be the beginning of a stop string."""
        text = self._decoded
        for start in range(max(self._emitted, len(text) - self._held_length), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)

    def _emit(self, end: int) -> str:
        new = self._decoded[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return new


def decoder_of(tokenizer: Any) -> Callable[[list[int], bool], str]:
    """How to decode token ids: `decode(ids, skip_special_tokens)`.

    transformers' `decode` checks what it is given and then calls its Rust part; a server does that twice a token, and
    the checks cost three times what the decoding does. So the Rust part is called where nothing lies between.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and _passes_through(tokenizer, backend):
        return backend.decode  # type: ignore[no-any-return]
    return lambda ids, skip_special: str(tokenizer.decode(ids, skip_special_tokens=skip_special))


def _passes_through(tokenizer: Any, backend: Any) -> bool:
    """Whether transformers' `decode` returns what the Rust part says: not overridden, and no spaces are cleaned up."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if kind.decode is not PreTrainedTokenizerBase.decode or kind._decode is not PreTrainedTokenizerFast._decode:
        return False
    cleans = tokenizer.clean_up_tokenization_spaces
    if cleans and type(backend.model).__name__ == "BPE":  # newer versions leave BPE's spaces alone, and have this flag
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    return not cleans
