"""Data sets of the Hugging Face Hub, through the `datasets` library: text to calibrate on and to measure on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import UserError


@dataclass(frozen=True)
class KnownDataset:
    """Where a data set of a well-known name is, and how its rows become text."""

    repository: str
    config: str | None
    split: str
    running_text: bool = False
    streaming: bool = False
    to_row: Callable[[Mapping[str, Any]], Any] | None = None


KNOWN: dict[str, KnownDataset] = {
    "wikitext": KnownDataset("Salesforce/wikitext", "wikitext-2-raw-v1", "train", running_text=True),
    "c4": KnownDataset("allenai/c4", "en", "train", streaming=True),
    "ultrachat_200k": KnownDataset("HuggingFaceH4/ultrachat_200k", None, "train_sft"),
    "open_platypus": KnownDataset(
        "garage-bAInd/Open-Platypus", None, "train", to_row=lambda row: f"{row['instruction']}\n{row['output']}"
    ),
    "gsm8k": KnownDataset("openai/gsm8k", "main", "train", to_row=lambda row: f"{row['question']}\n{row['answer']}"),
    "cnn_dailymail": KnownDataset("abisee/cnn_dailymail", "3.0.0", "train", to_row=lambda row: row["article"]),
}
ALIASES = {"ultrachat": "ultrachat_200k"}


@dataclass(frozen=True)
class Wording:
    """How the caller's users name a configuration and a split, and what needs no download."""

    config: str
    split: str
    instead: str


def hub_rows(
    name: str, config: str | None, split: str | None, streaming: bool, wording: Wording
) -> tuple[Iterable[Any], str, bool]:
    """Rows of a data set, what to call it, and whether it is running text.

    Known names stand for their repository, configuration and split; others are repositories. UserError says what to do,
    in the caller's `wording`, when the data set does not exist, is not open to you, or its download breaks.
    """
    known = KNOWN.get(ALIASES.get(name, name)) or KnownDataset(name, None, "train")
    config, split = config or known.config, split or known.split
    source = f"data set {known.repository}" + (f" ({config})" if config else "")
    load = _load_dataset(wording)
    rows = _explained(
        lambda: load(known.repository, config, split=split, streaming=streaming or known.streaming), source, wording
    )
    return _iterate(rows, source, wording, known.to_row), source, known.running_text


def _load_dataset(wording: Wording) -> Callable[..., Any]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            "reading a data set of the Hub needs the `datasets` package: pip install 'octavo[hub]'. Without it, "
            f"{wording.instead}",
            param="dataset",
        ) from None
    return load_dataset


def _iterate(
    rows: Iterable[Any], source: str, wording: Wording, to_row: Callable[[Mapping[str, Any]], Any] | None
) -> Iterator[Any]:
    """Streams download while they are read, so the errors of reading are explained as well."""
    iterator = iter(rows)
    while True:
        row = _explained(lambda: next(iterator, None), source, wording)
        if row is None:
            return
        yield row if to_row is None else to_row(row)


def _explained(action: Callable[[], Any], source: str, wording: Wording) -> Any:
    """Run what talks to the Hub; whatever it raises becomes one line that says what to do."""
    try:
        return action()
    except Exception as error:  # the libraries below raise a dozen unrelated kinds; the cause is kept
        raise UserError(f"{source}: {_reason(error, wording)}", param="dataset") from error


def _reason(error: Exception, wording: Wording) -> str:
    chained = _chain(error)
    text = " ".join(str(link) for link in chained)
    kinds = {type(link).__name__ for link in chained}
    status = next((code for link in chained if (code := _status(link))), None)
    instead = f"or {wording.instead}"
    if status in (401, 403) or "GatedRepoError" in kinds or "gated" in text:
        return (
            f"the Hub refuses access (HTTP {status or 401}). Check the name; if it is a gated or private data set, "
            f"accept its terms and log in with `hf auth login` (or set HF_TOKEN), {instead}"
        )
    if kinds & {"DatasetNotFoundError", "RepositoryNotFoundError"} or status == 404:
        return f"the Hub has no data set of that name. Check the spelling (owner/name), {instead}"
    if isinstance(error, ValueError) and ("BuilderConfig" in text or "Config name is missing" in text):
        return f"{_first_line(error)} Name one of them with {wording.config}"
    if isinstance(error, ValueError) and "split" in text.lower():
        return f"{_first_line(error)} Name one of them with {wording.split}"
    return f"it could not be downloaded or read ({type(error).__name__}: {_first_line(error)}). Try again, {instead}"


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _chain(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"
