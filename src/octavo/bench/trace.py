"""Recorded traffic: when requests came and how long they were, replayed with words of our own.

Two forms are read. CSV with TIMESTAMP, ContextTokens, GeneratedTokens (the Azure LLM inference traces), and JSONL with
timestamp (milliseconds), input_length, output_length and, where prefixes are known, hash_ids: one id for each 512
prompt tokens, equal ids meaning equal text (the Mooncake traces), so that a prefix cache hits as in the recording.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.bench.vocabulary import Vocabulary
from octavo.bench.workload import Prompt, Workload
from octavo.errors import UserError

HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceEntry:
    """One recorded request: seconds since the first one, lengths in tokens, ids of its prompt's blocks."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceEntry]:
    """The entries in time order. Raises UserError that names the line."""
    if path.suffix not in (".csv", ".jsonl"):
        raise UserError(f"--data is {str(path)!r}; --profile replay takes a trace (.csv or .jsonl)", param="data")
    read = _read_csv if path.suffix == ".csv" else _read_jsonl
    try:
        with path.open(encoding="utf-8", newline="") as file:
            entries = [_checked(entry, path, number) for number, entry in read(file, path)]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data trace {path} cannot be read: {error}", param="data") from None
    if not entries:
        raise UserError(f"--data trace {path} has no requests", param="data")
    entries.sort(key=lambda e: e.seconds)
    first = entries[0].seconds
    return [TraceEntry(e.seconds - first, e.prompt_tokens, e.output_tokens, e.hash_ids) for e in entries]


def trace_workload(entries: Sequence[TraceEntry], vocabulary: Vocabulary, salt: str, as_text: bool) -> Workload:
    """Prompts of the recorded lengths, in order, with equal words wherever the recording's block ids are equal."""

    def generate() -> Iterator[Prompt]:
        rng = random.Random(f"words/{salt}")
        for entry in entries:
            tokens: list[int] = []
            for block in entry.hash_ids:
                tokens += vocabulary.draw(random.Random(f"block/{salt}/{block}"), HASH_BLOCK_TOKENS)
            tokens = tokens[: entry.prompt_tokens]
            tokens += vocabulary.draw(rng, entry.prompt_tokens - len(tokens))
            content = vocabulary.text(tokens) if as_text else vocabulary.ids(tokens)
            yield Prompt(content, max(1, entry.output_tokens), len(tokens))

    return Workload(None, generate(), f"a trace of {len(entries)} requests, words from {vocabulary.origin}", False)


def _read_csv(file: Any, path: Path) -> Iterator[tuple[int, TraceEntry]]:
    rows = csv.DictReader(file)
    needed = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not needed <= set(rows.fieldnames or ()):
        raise UserError(f"{path} needs the columns {', '.join(sorted(needed))}", param="data")
    for number, row in enumerate(rows, 2):
        try:
            stamp = row["TIMESTAMP"].strip()[:26]  # some traces have seven digits of a second, Python reads six
            seconds = datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp()  # any one zone will do
            yield number, TraceEntry(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, TypeError, AttributeError):
            raise UserError(f"{path}:{number} is no trace entry: {row}", param="data") from None


def _read_jsonl(file: Any, path: Path) -> Iterator[tuple[int, TraceEntry]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            ids = tuple(int(i) for i in row.get("hash_ids") or ())
            yield number, TraceEntry(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), ids)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{path}:{number} is no trace entry: {line[:100]}", param="data") from None


def _checked(entry: TraceEntry, path: Path, number: int) -> TraceEntry:
    if entry.prompt_tokens < 1:
        raise UserError(f"{path}:{number} has a prompt of {entry.prompt_tokens} tokens", param="data")
    return entry
