"""From a request's fields to the engine's SamplingParams, with the model's defaults and the server's bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.errors import CapacityError, UserError
from octavo.server.config import ServerConfig
from octavo.server.errors import bad_request
from octavo.server.protocol import SamplingFields

MAX_STOP_CHARS = 1024
MAX_LIST_ITEMS = 1024  # logit_bias, stop_token_ids, bad_words; allowed_token_ids may be the vocabulary
MAX_SALT_CHARS = 128
MAX_PRIORITY = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16

# fields that have the same name and meaning in SamplingParams
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_FROM_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ParamsBuilder:
    """Builds SamplingParams for one model.

    `defaults` are sampling defaults from generation_config.json (see `sampling_defaults`); `max_new_tokens` among them
    bounds every answer.
    """

    def __init__(self, config: ServerConfig, defaults: Mapping[str, Any], max_model_len: int, vocab_size: int) -> None:
        self._config = config
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._max_new_tokens: int | None = defaults.get("max_new_tokens")
        self._defaults = {name: defaults[name] for name in _FROM_GENERATION_CONFIG if defaults.get(name) is not None}

    def build(self, request: SamplingFields, *, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Everything but max_tokens, which depends on the prompt's length (see `fit`)."""
        self._check_sizes(request)
        values = dict(self._defaults)
        values.update({name: getattr(request, name) for name in _SAME if getattr(request, name) is not None})
        if request.logit_bias:
            values["logit_bias"] = self._logit_bias(request.logit_bias)
        values["logprobs"] = self._bounded_logprobs("logprobs", logprobs)
        values["prompt_logprobs"] = self._bounded_logprobs("prompt_logprobs", prompt_logprobs)
        values["max_tokens"] = self.max_model_len  # so that min_tokens is compared with the most that can be asked for
        return SamplingParams(**values)

    def requested_tokens(
        self, value: int | None, name: str, *, default: int | None, allow_zero: bool = False
    ) -> int | None:
        """The number of tokens asked for, checked; None is as many as the context takes."""
        if value is None:
            return default
        low = 0 if allow_zero else 1
        if not low <= value <= self.max_model_len:
            raise UserError(
                f"{name} is {value}; it must be {low} to {self.max_model_len}, the model's maximum context length",
                param=name,
            )
        return value

    def fit(self, params: SamplingParams, prompt_len: int, requested: int | None) -> SamplingParams:
        """`params` with the max_tokens that prompt and context leave. CapacityError when they leave none."""
        room = self.max_model_len - prompt_len
        if room < 1:
            raise context_too_long(prompt_len, self.max_model_len)
        limits = [room, requested, self._max_new_tokens]
        max_tokens = max(1, min(limit for limit in limits if limit is not None))
        return dataclasses.replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))

    def truncate(self, prompt_ids: list[int], limit: int | None, side: str | None) -> list[int]:
        """The last (or, with side "right", first) `limit` tokens; -1 keeps what leaves room for one new token."""
        if side not in (None, "left", "right"):
            raise bad_request(f"truncation_side is {side!r}; it must be 'left' or 'right'", "truncation_side")
        if limit is None:
            return prompt_ids
        if limit != -1 and not 1 <= limit <= self.max_model_len:
            raise bad_request(
                f"truncate_prompt_tokens is {limit}; it must be -1 or 1 to {self.max_model_len}",
                "truncate_prompt_tokens",
            )
        kept = self.max_model_len - 1 if limit == -1 else limit
        return prompt_ids[:kept] if side == "right" else prompt_ids[-kept:]

    def _bounded_logprobs(self, name: str, value: int | None) -> int | None:
        bound = self._config.max_logprobs
        if value is None:
            return None
        if bound == -1:
            if not -1 <= value <= self.vocab_size:
                raise bad_request(f"{name} is {value}; it must be -1 to {self.vocab_size}", name)
        elif not 0 <= value <= bound:
            raise bad_request(f"{name} is {value}; it must be 0 to {bound} (--max-logprobs)", name)
        return value

    def _logit_bias(self, bias: dict[str, float]) -> dict[int, float]:
        result = {}
        for key, value in bias.items():
            if not (key.isascii() and key.isdigit() and int(key[:12]) < self.vocab_size):
                raise bad_request(
                    f"logit_bias has the key {key[:40]!r}; keys are token ids, 0 to {self.vocab_size - 1}", "logit_bias"
                )
            if not -100 <= value <= 100:
                raise bad_request(f"logit_bias of token {key} is {value}; it must be -100 to 100", "logit_bias")
            result[int(key)] = value
        return result

    def _check_sizes(self, request: SamplingFields) -> None:
        config = self._config
        if request.n is not None and not 1 <= request.n <= config.max_n:
            raise bad_request(f"n is {request.n}; it must be 1 to {config.max_n} (--max-n)", "n")
        if request.seed is not None and not -(2**63) <= request.seed < 2**63:
            raise bad_request(f"seed is {request.seed}; it must fit 64 bits", "seed")
        for name in ("top_k", "min_tokens", "priority", "stream_interval"):
            value = getattr(request, name)
            if value is not None and not -MAX_PRIORITY <= value <= MAX_PRIORITY:
                raise bad_request(f"{name} is {value}; it must fit 32 bits", name)
        if request.stream_interval is not None and request.stream_interval < 1:
            raise bad_request(f"stream_interval is {request.stream_interval}; it must be at least 1", "stream_interval")
        self._check_stop(request.stop)
        for name in ("logit_bias", "stop_token_ids", "bad_words"):
            value = getattr(request, name)
            if value is not None and len(value) > MAX_LIST_ITEMS:
                raise bad_request(f"{name} has {len(value)} entries; at most {MAX_LIST_ITEMS} are allowed", name)
        for name in ("stop_token_ids", "allowed_token_ids"):
            self._check_token_ids(name, getattr(request, name))
        self._check_salt(request.cache_salt)

    def _check_token_ids(self, name: str, ids: list[int] | None) -> None:
        wrong = next((t for t in ids or () if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise bad_request(f"{name} holds {wrong}; token ids are 0 to {self.vocab_size - 1}", name)
        if name == "allowed_token_ids" and ids is not None and not 1 <= len(ids) <= self.vocab_size:
            raise bad_request(f"allowed_token_ids has {len(ids)} entries; it must have 1 to {self.vocab_size}", name)

    def _check_stop(self, stop: str | list[str] | None) -> None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > self._config.max_stop_strings:
            raise bad_request(
                f"stop has {len(strings)} strings; at most {self._config.max_stop_strings} are allowed", "stop"
            )
        for string in strings:
            if not 1 <= len(string) <= MAX_STOP_CHARS:
                raise bad_request(
                    f"stop has a string of {len(string)} characters; each must have 1 to {MAX_STOP_CHARS}", "stop"
                )

    def _check_salt(self, salt: str | None) -> None:
        if salt is None:
            return
        if not 1 <= len(salt) <= MAX_SALT_CHARS:
            raise bad_request(
                f"cache_salt has {len(salt)} characters; it must have 1 to {MAX_SALT_CHARS}", "cache_salt"
            )


def sampling_defaults(config: ServerConfig, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults of this server: the model's generation_config.json unless turned off, then the override."""
    chosen = dict(generation_config) if config.generation_config == "auto" else {}
    chosen.update(config.override_generation_config or {})
    return chosen


def context_too_long(prompt_len: int, max_model_len: int) -> CapacityError:
    return CapacityError(
        f"This model's maximum context length is {max_model_len} tokens, and the prompt alone has {prompt_len}: "
        f"shorten it to at most {max_model_len - 1} tokens, or let the server do so with truncate_prompt_tokens",
        param="prompt",
    )
