"""Calibration data: token sequences from a data set of the Hub, a file, Python objects or the built-in text."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.builtin_text import builtin_text
from octavo.errors import UserError
from octavo.hub_data import Wording, hub_rows

_PIECE = 4_000_000  # characters that are tokenized at once
_DEFAULT_LENGTH = 512
_WORDING = Wording("dataset_config_name", "splits", "give a text file instead, or no data set for the built-in text")
FILE_TYPES = (".txt", ".raw", ".md", ".jsonl", ".json", ".csv")


@dataclass(frozen=True)
class CalibrationSpec:
    """What to calibrate on; the names are LLM Compressor's.

    `dataset` is a name on the Hub or known (wikitext), a path of a local file, a datasets.Dataset, a list of texts, of
    token id lists or of rows, or None for the built-in text. `concatenate_data` None means: running text (plain files,
    the built-in text, wikitext) is cut into windows of `max_seq_length`, rows of anything else are sequences of their
    own. `shuffle_calibration_samples` draws the sequences at random by `seed`; otherwise the first ones are taken. With
    `moe_calibrate_all_experts` each expert of a mixture sees all tokens, else those that are sent to it.
    """

    dataset: Any = None
    dataset_config_name: str | None = None
    splits: str | None = None
    text_column: str = "text"
    num_calibration_samples: int = 128
    max_seq_length: int | None = None
    shuffle_calibration_samples: bool = False
    concatenate_data: bool | None = None
    streaming: bool = False
    seed: int = 0
    moe_calibrate_all_experts: bool = True

    def __post_init__(self) -> None:
        for name, least in (("num_calibration_samples", 1), ("max_seq_length", 8)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise UserError(f"{name} is {value!r}; it must be a whole number of at least {least}", param=name)

    def within(self, context: int | None) -> CalibrationSpec:
        """With max_seq_length set: 512 tokens by default, never more than a model's context."""
        if self.max_seq_length is None:
            return replace(self, max_seq_length=min(_DEFAULT_LENGTH, context or _DEFAULT_LENGTH))
        if context is not None and self.max_seq_length > context:
            raise UserError(
                f"max_seq_length is {self.max_seq_length}, but the model's context ends at {context} tokens",
                param="max_seq_length",
            )
        return self


@dataclass
class CalibrationData:
    """Sequences int64 [1, T], where they came from, and messages."""

    samples: list[Tensor]
    source: str
    notes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """All tokens of all sequences."""
        return sum(sample.numel() for sample in self.samples)

    @property
    def alike(self) -> bool:
        """Whether all sequences have the same length."""
        return len({sample.shape[1] for sample in self.samples}) == 1

    def digest(self) -> str:
        """Changes with any token and with the order."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(sample.numpy().tobytes() + b"|")
        return digest.hexdigest()[:16]


def load_calibration(spec: CalibrationSpec, tokenizer: Any) -> CalibrationData:
    """Read and tokenize. UserError for what cannot be found, read, or holds no text.

    `tokenizer` may be None where the rows are token ids.
    """
    spec = spec.within(None)
    length: int = spec.max_seq_length  # type: ignore[assignment]
    rows, source, running = _rows(spec)
    wanted = spec.num_calibration_samples
    concatenate = running if spec.concatenate_data is None else spec.concatenate_data
    limit = None if spec.shuffle_calibration_samples else wanted
    if concatenate:
        sequences = _windows(_texts(rows, spec, tokenizer, source), length, limit, tokenizer)
    else:
        encoded = (_encode(row, spec, tokenizer, source) for row in rows)
        sequences = list(islice((ids[:length] for ids in encoded if len(ids) > 1), limit))
    if spec.shuffle_calibration_samples:
        order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(spec.seed)).tolist()
        sequences = [sequences[index] for index in order[:wanted]]
    if not sequences:
        raise UserError(f"{source} holds no text to calibrate on (less than two tokens)", param="dataset")
    data = CalibrationData([torch.tensor([ids]) for ids in sequences], source)
    if concatenate and len(sequences[0]) < length:
        data.notes.append(f"{source} has {len(sequences[0])} tokens, less than one sequence of {length}")
    if len(sequences) < wanted:
        data.notes.append(f"{source} gave {len(sequences)} calibration sequences instead of {wanted}")
    return data


def _rows(spec: CalibrationSpec) -> tuple[Iterable[Any], str, bool]:
    """Rows (texts, mappings, token ids), what to call them, and whether they are running text."""
    dataset = spec.dataset
    if dataset is None:
        return [builtin_text("calibration")], "the built-in text (Python's pydoc_data.topics)", True
    if isinstance(dataset, str | Path):
        path = Path(dataset).expanduser()
        if path.is_file():
            return _file_rows(path), str(path), path.suffix.lower() not in (".jsonl", ".json", ".csv")
        if path.suffix.lower() in FILE_TYPES or isinstance(dataset, Path):
            raise UserError(f"calibration file {dataset} is not there; give the path of a file", param="dataset")
        return hub_rows(dataset, spec.dataset_config_name, spec.splits, spec.streaming, _WORDING)
    if isinstance(dataset, Mapping):
        return _split(dataset, spec.splits), "the given data set", False
    if isinstance(dataset, Iterable):
        return dataset, "the given data", False
    raise UserError(
        f"dataset is a {type(dataset).__name__}; it must be a name, a path, a datasets.Dataset or a list",
        param="dataset",
    )


def _split(datasets: Mapping[str, Any], split: str | None) -> Iterable[Any]:
    name = split or next((key for key in ("train", "calibration", "train_sft") if key in datasets), None)
    if name is None or name not in datasets:
        raise UserError(f"splits is {split!r}; the data set has {sorted(datasets)}", param="splits")
    return datasets[name]


def _file_rows(path: Path) -> Iterator[Any]:
    try:
        if path.suffix.lower() == ".jsonl":
            with path.open(encoding="utf-8") as file:
                yield from (json.loads(line) for line in file if line.strip())
        elif path.suffix.lower() == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            yield from content if isinstance(content, list) else [content]
        elif path.suffix.lower() == ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                yield from csv.DictReader(file)
        else:
            with path.open(encoding="utf-8") as file:
                while piece := file.read(_PIECE):
                    yield piece
    except (UnicodeDecodeError, json.JSONDecodeError, OSError) as error:
        raise UserError(f"calibration file {path} cannot be read: {error}", param="dataset") from None


def _text(row: Any, spec: CalibrationSpec, tokenizer: Any, source: str) -> str:
    """The text of a row: a string, its text column, or its messages under the chat template."""
    if tokenizer is None:
        raise UserError(f"{source} is text, but there is no tokenizer for this model; give tokenizer=...")
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping):
        if isinstance(row.get(spec.text_column), str):
            return row[spec.text_column]
        messages = row.get("messages") or row.get("conversations")
        if messages and getattr(tokenizer, "chat_template", None):
            return tokenizer.apply_chat_template(messages, tokenize=False)
        raise UserError(
            f"{source}: a row has the columns {sorted(map(str, row))}, none of them is {spec.text_column!r}, messages "
            "or input_ids; name the column with text_column",
            param="text_column",
        )
    raise UserError(f"{source}: a row is a {type(row).__name__}; it must be a text, a mapping or token ids")


def _encode(row: Any, spec: CalibrationSpec, tokenizer: Any, source: str) -> list[int]:
    ids = row.get("input_ids") if isinstance(row, Mapping) else None if isinstance(row, str) else row
    if ids is not None:
        flat = torch.as_tensor(ids).reshape(-1)
        if flat.is_floating_point():
            raise UserError(f"{source}: token ids must be whole numbers, not {flat.dtype}")
        return flat.tolist()
    is_chat = isinstance(row, Mapping) and not isinstance(row.get(spec.text_column), str)
    text = _text(row, spec, tokenizer, source)
    return tokenizer(text, add_special_tokens=not is_chat, truncation=True, max_length=spec.max_seq_length)["input_ids"]


def _texts(rows: Iterable[Any], spec: CalibrationSpec, tokenizer: Any, source: str) -> Iterator[str]:
    """Texts of up to some millions of characters, for the tokenizer is slow on small ones."""
    pending: list[str] = []
    size = 0
    for row in rows:
        text = _text(row, spec, tokenizer, source)
        pending.append(text)
        size += len(text)
        if size >= _PIECE:
            yield _join(pending)
            pending, size = [], 0
    if pending:
        yield _join(pending)


def _join(texts: list[str]) -> str:
    """Rows that keep their line ends (wikitext's) follow each other as they are; others get a blank line between."""
    separator = "" if any(text.endswith("\n") for text in texts) else "\n\n"
    return separator.join(texts)


def _windows(texts: Iterator[str], length: int, limit: int | None, tokenizer: Any) -> list[list[int]]:
    """Windows of `length` tokens, each beginning with what the tokenizer puts first (BOS or nothing)."""
    first = list(tokenizer("")["input_ids"])[:1]
    step = length - len(first)
    tokens: list[int] = []
    for text in texts:
        tokens = list(chain(tokens, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))
        if limit is not None and len(tokens) >= limit * step:
            break
    count = len(tokens) // step
    if count == 0 and len(tokens) > 1:
        return [first + tokens]
    return [first + tokens[i * step : (i + 1) * step] for i in range(count if limit is None else min(count, limit))]
