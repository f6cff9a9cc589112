"""How the tokens of a request are chosen and when it stops: vLLM's names and defaults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from octavo.errors import UserError

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature the most probable token is taken."""


@dataclass
class SamplingParams:
    """Parameters of one request; `UserError` names a bad value and its range.

    n: sequences to sample for the prompt (whoever submits requests submits n of them).
    presence_penalty, frequency_penalty: -2 to 2, subtracted from the logits of tokens sampled before, once or by count.
    repetition_penalty: above 0; above 1 discourages tokens of the prompt and of the output.
    temperature: 0 is greedy. top_p in (0, 1]. top_k: 0 or -1 is off. min_p in [0, 1], relative to the best token.
    seed: makes the request's draws reproducible, whatever else runs.
    stop: strings that end the output; stop_token_ids: tokens that do; ignore_eos: the end-of-sequence token does not.
    max_tokens: output tokens at most, None up to the end of the context; min_tokens: no stop token before so many.
    logprobs, prompt_logprobs: how many most probable tokens are reported a position; -1 is the whole vocabulary.
    logit_bias: token id to a number in [-100, 100] added to its logit; allowed_token_ids: nothing else is sampled;
    bad_words: strings that are never produced.
    detokenize, skip_special_tokens, include_stop_str_in_output: how text is made. spaces_between_special_tokens is
    accepted for compatibility: fast tokenizers, the only ones used here, put no spaces there, whatever it says.
    truncate_prompt_tokens: keep the last so many prompt tokens, -1 as many as the context takes (see `truncate`).
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self._check_numbers()
        self._check_lengths()
        self._check_lists()
        for name in _FLAGS:
            if type(getattr(self, name)) is not bool:
                raise _error(name, getattr(self, name), "true or false")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list, empty when there are none."""
        return list(self.stop or ())

    def replace(self, **changes: Any) -> SamplingParams:
        """A checked copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def truncate(self, prompt_token_ids: list[int], max_model_len: int) -> list[int]:
        """Apply `truncate_prompt_tokens`, which cuts on the left; -1 leaves room for one new token in the context."""
        if self.truncate_prompt_tokens is None:
            return prompt_token_ids
        keep = max_model_len - 1 if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        return prompt_token_ids[-keep:] if keep > 0 else []

    def _check_numbers(self) -> None:
        for name, is_allowed, allowed in _FLOAT_RANGES:
            value = getattr(self, name)
            if not _is_number(value) or not is_allowed(value):
                raise _error(name, value, allowed)
        for name, least, optional in _INT_RANGES:
            value = getattr(self, name)
            if value is None and optional:
                continue
            if type(value) is not int or value < least:
                raise _error(name, value, f"an integer of at least {least}" + (" or null" if optional else ""))
        if self.seed is not None and (type(self.seed) is not int or not -(1 << 63) <= self.seed < 1 << 63):
            raise _error("seed", self.seed, "an integer of 64 bits or null")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _error("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        if self.truncate_prompt_tokens == 0:
            raise _error("truncate_prompt_tokens", 0, "-1 (the context's length) or at least 1")

    def _check_lists(self) -> None:
        if self.stop is not None and not _is_list_of(self.stop, str, bool):
            raise _error("stop", self.stop, "a string that is not empty, or a list of such")
        if self.stop and not self.detokenize:
            raise UserError(
                f"stop is {self.stop!r} but detokenize is false: stop strings need text; use stop_token_ids",
                param="stop",
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not _is_list_of(value, int, lambda token: token >= 0):
                raise _error(name, value, "a list of token ids, integers of at least 0")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _error("allowed_token_ids", self.allowed_token_ids, "a list with at least one token id, or null")
        if self.bad_words is not None and not _is_list_of(self.bad_words, str, bool):
            raise _error("bad_words", self.bad_words, "a list of strings that are not empty")
        if self.logit_bias is not None:
            self.logit_bias = _checked_bias(self.logit_bias)


_FLOAT_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("presence_penalty", lambda x: -2 <= x <= 2, "a number from -2 to 2"),
    ("frequency_penalty", lambda x: -2 <= x <= 2, "a number from -2 to 2"),
    ("repetition_penalty", lambda x: x > 0, "a number above 0 (1 is off)"),
    ("temperature", lambda x: x >= 0, "a number of at least 0 (0 is greedy)"),
    ("top_p", lambda x: 0 < x <= 1, "a number above 0 and at most 1 (1 is off)"),
    ("min_p", lambda x: 0 <= x <= 1, "a number from 0 to 1 (0 is off)"),
)
_INT_RANGES: tuple[tuple[str, int, bool], ...] = (
    ("n", 1, False),
    ("top_k", -1, False),
    ("max_tokens", 1, True),
    ("min_tokens", 0, False),
    ("logprobs", -1, True),
    ("prompt_logprobs", -1, True),
    ("truncate_prompt_tokens", -1, True),
)
_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def _error(name: str, value: object, allowed: str) -> UserError:
    return UserError(f"{name} is {value!r}; it must be {allowed}", param=name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list_of(value: Iterable[Any], kind: type, is_allowed: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(type(item) is kind and is_allowed(item) for item in value)


def _checked_bias(bias: object) -> dict[int, float]:
    """Keys may be strings of digits, as JSON has them."""
    if not isinstance(bias, dict):
        raise _error("logit_bias", bias, "a mapping of token ids to numbers from -100 to 100")
    checked = {}
    for token, value in bias.items():
        is_id = (type(token) is int and token >= 0) or (isinstance(token, str) and token.isdecimal())
        if not is_id or not _is_number(value) or not -100 <= value <= 100:
            raise _error("logit_bias", {token: value}, "a mapping of token ids to numbers from -100 to 100")
        checked[int(token)] = float(value)
    return checked
