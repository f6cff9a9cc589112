"""Turns token ids into text one step at a time, and finds stop strings on the way."""

from __future__ import annotations

from typing import Any

from octavo.core.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # what a decoder prints for bytes that are not (yet) a character
CONTEXT_TOKENS = 6  # tokens before the new one that a decoder may need to place spaces right
LONGEST_CHARACTER = 16  # tokens; an incomplete character that goes on for longer is garbage and is let through


class Detokenizer:
    """Incremental text of one answer.

    Decoding a token alone loses the spaces and the characters that span tokens, so each step decodes a short window
    twice, without and with the new tokens, and emits the difference. Text that ends in an incomplete character, or
    that may still grow into a stop string, is held back.

    `text` is what was emitted so far. After a stop string, `finished` is True and `stop_reason` names it.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held_length = max((len(s) for s in self._stops), default=1) - 1
        self._ids = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._num_context = len(self._ids)
        self._prefix_start = 0
        self._read = len(self._ids)
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
        before = self._text_of(self._ids[self._prefix_start : self._read])
        now = self._text_of(self._ids[self._prefix_start :])
        is_waiting = len(now) <= len(before) or now.endswith(REPLACEMENT)
        if is_waiting and not flush and len(self._ids) - self._read < LONGEST_CHARACTER:
            return
        self._decoded += now[len(before) :]
        self._prefix_start = self._read
        self._read = len(self._ids)

    def _text_of(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)) if ids else ""

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
