"""The text that a model is measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.builtin_text import builtin_text
from octavo.errors import UserError
from octavo.evaluate.config import PerplexityConfig
from octavo.hub_data import Wording, hub_rows

_WORDING = Wording(
    "--dataset-config", "--dataset-split", "take --file TEXT or --dataset builtin, which need no download"
)


def load_text(config: PerplexityConfig) -> tuple[str, str]:
    """The text and a line that says what it is. Raises UserError that says why it cannot be had and what can."""
    if config.file is not None:
        return _read_file(Path(config.file)), Path(config.file).name
    if config.dataset == "builtin":
        return builtin_text("heldout"), "Python's documentation, held-out part"
    rows, source, _ = hub_rows(str(config.dataset), config.dataset_config, config.dataset_split, False, _WORDING)
    # The quantization papers join WikiText's lines in this way; another joint is another text.
    return "\n\n".join(_text(row, source) for row in rows), f"{source}, split {config.dataset_split}"


def _read_file(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")  # no newline translation: the tokens depend on it
    except OSError as error:
        raise UserError(f"--file {path} cannot be read: {error.strerror}", param="file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--file {path} is not UTF-8 text (byte {error.start})", param="file") from None
    return text


def _text(row: Any, source: str) -> str:
    if isinstance(row, str):
        return row
    if not isinstance(row.get("text"), str):
        columns = ", ".join(row)
        raise UserError(f"{source} has no text column (it has {columns}); {_WORDING.instead}", param="dataset")
    return str(row["text"])
