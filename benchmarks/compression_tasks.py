"""Multiple-choice and last-word tasks as token sequences, with the prompts of lm-eval 0.4 (zero-shot).

PIQA: "Question: GOAL\\nAnswer:" and " CHOICE". ARC-Easy: the same form. HellaSwag: "ACTIVITY: CONTEXT" with its
second sentence capitalised and " ENDING". LAMBADA: the text without its last word, and " WORD".
"""

from __future__ import annotations

import bz2
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Item:
    """A context and its possible continuations, `gold` the right one's index (LAMBADA: the only one)."""

    context: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Sequence:
    """Tokens of a context and one continuation: the last `scored` are predicted. `length` is the choice's in bytes."""

    tokens: list[int]
    scored: int
    length: int


def piqa(path: Path) -> Iterator[Item]:
    for row in _rows(path):
        yield Item(row["query"].rstrip("\n") + "\nAnswer:", tuple(row["choices"]), row["gold"])


def arc(path: Path) -> Iterator[Item]:
    for row in _rows(path):
        yield Item(row["query"] + "\nAnswer:", tuple(row["choices"]), row["gold"])


def lambada(path: Path) -> Iterator[Item]:
    for row in _rows(path):
        yield Item(row["context"], (row["continuation"],), 0)


def hellaswag(path: Path) -> Iterator[Item]:
    """Six lines an item: context, gold index, four endings."""
    lines = bz2.decompress(path.read_bytes()).decode("utf-8").split("\n")
    for start in range(0, len(lines) - 5, 6):
        context, gold, *endings = lines[start : start + 6]
        yield Item(_clean(_capitalised(context)), tuple(_clean(ending) for ending in endings), int(gold))


TASKS: dict[str, Callable[[Path], Iterator[Item]]] = {
    "piqa": piqa,
    "arc_easy": arc,
    "lambada": lambada,
    "hellaswag": hellaswag,
}
BY_LENGTH = frozenset({"hellaswag", "piqa"})  # acc_norm: log-likelihood divided by the choice's length


def draw(items: list[Item], count: int) -> list[Item]:
    """A random `count` of them, always the same ones, in order."""
    chosen = random.Random(1234).sample(range(len(items)), min(count, len(items)))
    return [items[index] for index in sorted(chosen)]


def encode(item: Item, tokenizer: Any, first: list[int]) -> list[Sequence]:
    """One sequence a choice; the blank before a choice belongs to the choice, as in lm-eval."""
    context = tokenizer(item.context, add_special_tokens=False)["input_ids"]
    sequences = []
    for choice in item.choices:
        whole = tokenizer(f"{item.context} {choice}", add_special_tokens=False)["input_ids"]
        sequences.append(Sequence(first + whole, max(1, len(whole) - len(context)), len(choice.encode())))
    return sequences


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _capitalised(context: str) -> str:
    """lm-eval capitalises the unfinished second sentence of a context that does not end in punctuation."""
    if context.rstrip()[-1:] in ".!?":
        return context
    head, end, tail = context.rpartition(". ")
    return f"{head}{end}{tail[:1].upper()}{tail[1:].lower()}" if end else context


def _clean(text: str) -> str:
    """lm-eval's treatment of WikiHow's markup."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
