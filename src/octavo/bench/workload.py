"""What is asked: synthetic prompts of stated lengths that no prefix cache has seen, or the lines of a JSONL file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from octavo.bench.vocabulary import Vocabulary
from octavo.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """One request's content: text, token ids or chat messages, and how much output to ask for."""

    content: str | list[int] | list[dict[str, Any]]
    output_tokens: int | None
    num_tokens: int | None = None  # what was asked for; the server's own count is in `usage`
    is_repeated: bool = False

    def messages(self) -> list[dict[str, Any]]:
        """The content as chat messages."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        return self.content  # type: ignore[return-value]


@dataclass(frozen=True)
class Length:
    """A number of tokens: fixed, normal (stdev, clipped to minimum..maximum) or uniform (minimum and maximum alone)."""

    mean: int
    stdev: float | None = None
    minimum: int | None = None
    maximum: int | None = None

    def draw(self, rng: random.Random) -> int:
        if self.stdev is None and self.minimum is None and self.maximum is None:
            return self.mean
        low = self.minimum if self.minimum is not None else 1
        high = self.maximum if self.maximum is not None else max(low, self.mean + math.ceil(5 * (self.stdev or 0)))
        if self.stdev is None:
            return rng.randint(low, high)
        return min(high, max(low, round(rng.gauss(self.mean, self.stdev))))

    def check(self, name: str) -> None:
        if self.mean < 1:
            raise UserError(f"{name} is {self.mean}; it must be at least 1", param="data")
        if self.stdev is not None and self.stdev < 0:
            raise UserError(f"{name}_stdev is {self.stdev}; it must be 0 or more", param="data")
        low = 1 if self.minimum is None else self.minimum
        if low < 1 or (self.maximum is not None and self.maximum < low):
            raise UserError(f"{name} may lie in {low}..{self.maximum}; give 1 <= minimum <= maximum", param="data")


@dataclass(frozen=True)
class SyntheticSpec:
    """`--data "prompt_tokens=256,output_tokens=128,..."`. Without `samples` every request has a prompt of its own."""

    prompt_tokens: int
    output_tokens: int = 128
    prompt_tokens_stdev: float | None = None
    prompt_tokens_min: int | None = None
    prompt_tokens_max: int | None = None
    output_tokens_stdev: float | None = None
    output_tokens_min: int | None = None
    output_tokens_max: int | None = None
    prefix_tokens: int = 0
    prefix_count: int = 1
    samples: int | None = None

    @classmethod
    def parse(cls, text: str) -> SyntheticSpec:
        """Read key=value pairs. Raises UserError that names an unknown key, a bad number or what is missing."""
        known = {f.name: float if f.name.endswith("_stdev") else int for f in fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, separator, value = part.partition("=")
            key = key.strip()
            if not separator or key not in known:
                raise UserError(
                    f"--data has {part!r}; give key=value pairs of {', '.join(known)}, or an existing .jsonl file",
                    param="data",
                )
            try:
                values[key] = known[key](value)
            except ValueError:
                raise UserError(f"--data has {part!r}; {key} must be a number", param="data") from None
        if "prompt_tokens" not in values:
            raise UserError(f"--data is {text!r}; prompt_tokens is missing, as in prompt_tokens=256", param="data")
        spec = cls(**values)
        spec.prompt_length.check("prompt_tokens")
        spec.output_length.check("output_tokens")
        for name, least in (("prefix_tokens", 0), ("prefix_count", 1), ("samples", 1)):
            value = getattr(spec, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it must be at least {least}", param="data")
        return spec

    @property
    def prompt_length(self) -> Length:
        return Length(self.prompt_tokens, self.prompt_tokens_stdev, self.prompt_tokens_min, self.prompt_tokens_max)

    @property
    def output_length(self) -> Length:
        return Length(self.output_tokens, self.output_tokens_stdev, self.output_tokens_min, self.output_tokens_max)


@dataclass
class Workload:
    """An endless supply of prompts; `samples` different ones (None: every one is new), then the first again, marked."""

    samples: int | None
    source: Iterator[Prompt]
    description: str
    is_endless: bool = True
    _kept: list[Prompt] = field(default_factory=list)
    _taken: int = 0

    def take(self) -> Prompt:
        """The next prompt."""
        self._taken += 1
        if self.samples is None:
            return next(self.source)
        if len(self._kept) < self.samples:
            self._kept.append(next(self.source))
            return self._kept[-1]
        prompt = self._kept[(self._taken - 1) % self.samples]
        return Prompt(prompt.content, prompt.output_tokens, prompt.num_tokens, is_repeated=True)

    def probe(self) -> Prompt:
        """A prompt for the request before the load; it is none of the samples, so that no sample is cached by it."""
        return next(self.source) if self.is_endless else Prompt("Hello", 8)

    def warning(self, num_requests: int | None) -> str | None:
        """What to say when fewer samples than requests are given (None: unknown, because time ends the load)."""
        if self.samples is None or (num_requests is not None and num_requests <= self.samples):
            return None
        how_many = f"{num_requests} requests" if num_requests is not None else "a load that only time ends"
        return (
            f"samples={self.samples} is less than {how_many}: prompts repeat, and a prefix cache makes the repeated "
            "ones faster than real traffic. Give more samples, or leave samples out"
        )


def synthetic(spec: SyntheticSpec, vocabulary: Vocabulary, seed: int, salt: str, as_text: bool) -> Workload:
    """Prompts of random single-token words. Lengths follow `seed` alone, the words `salt`, so a repeated load has the
    same shape and yet misses every prefix cache; only `prefix_tokens` are shared, among `prefix_count` groups."""

    def generate() -> Iterator[Prompt]:
        lengths = random.Random(f"lengths/{seed}")
        words = random.Random(f"words/{salt}")
        prefixes = [vocabulary.draw(words, spec.prefix_tokens) for _ in range(spec.prefix_count)]
        while True:
            num_prompt, num_output = spec.prompt_length.draw(lengths), spec.output_length.draw(lengths)
            prefix = prefixes[lengths.randrange(len(prefixes))]
            tokens = prefix + vocabulary.draw(words, num_prompt)
            content = vocabulary.text(tokens) if as_text else vocabulary.ids(tokens)
            yield Prompt(content, num_output, len(tokens))

    return Workload(spec.samples, generate(), f"synthetic, words from {vocabulary.origin}")


def from_file(path: Path, request_format: str) -> Workload:
    """The lines of a JSONL file: `prompt` (text or token ids) or `messages`, and `output_tokens` or `max_tokens`.

    Raises UserError that names the line.
    """
    prompts: list[Prompt] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data file {path} cannot be read: {error}", param="data") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompts.append(_parse_line(line, f"{path}:{number}", request_format))
    if not prompts:
        raise UserError(f"--data file {path} has no prompts; give one JSON object a line", param="data")
    return Workload(len(prompts), iter(prompts), f"{len(prompts)} prompts of {path.name}", is_endless=False)


def _parse_line(line: str, where: str, request_format: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}", param="data") from None
    if not isinstance(entry, dict):
        raise UserError(f"{where} is not a JSON object", param="data")
    output = entry.get("output_tokens", entry.get("max_tokens"))
    if output is not None and (not isinstance(output, int) or output < 1):
        raise UserError(f"{where}: output_tokens is {output!r}; it must be a number of at least 1", param="data")
    content: Any = entry.get("messages", entry.get("prompt"))
    is_list = isinstance(content, list) and bool(content)
    is_ids = is_list and all(isinstance(i, int) for i in content)
    is_messages = is_list and all(isinstance(m, dict) for m in content)
    if not content or not (isinstance(content, str) or is_ids or is_messages):
        raise UserError(f"{where} needs `prompt` (text or token ids) or `messages`", param="data")
    if request_format == "chat" and is_ids:
        raise UserError(f"{where} has token ids, which the chat route does not take; use completions", param="data")
    if request_format == "completions" and is_messages:
        raise UserError(f"{where} has messages; use --request-format chat", param="data")
    return Prompt(content, output, len(content) if is_ids else None)
