"""The text that a model is measured on."""

from __future__ import annotations

from pathlib import Path

from octavo.builtin_text import builtin_text
from octavo.errors import UserError
from octavo.evaluate.config import PerplexityConfig

KNOWN_DATASETS = {"wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1")}


def load_text(config: PerplexityConfig) -> tuple[str, str]:
    """The text and a line that says what it is. Raises UserError that says why it cannot be had and what can."""
    if config.file is not None:
        return _read_file(Path(config.file)), Path(config.file).name
    if config.dataset == "builtin":
        return builtin_text("heldout"), "Python's documentation, held-out part"
    name, subset = KNOWN_DATASETS.get(config.dataset or "", (config.dataset or "", None))
    subset = config.dataset_config or subset
    lines = _load_lines(name, subset, config.dataset_split)
    # The quantization papers join WikiText's lines in this way; another joint is another text.
    return "\n\n".join(lines), f"{name} {subset or ''} {config.dataset_split}".replace("  ", " ")


def _read_file(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")  # no newline translation: the tokens depend on it
    except OSError as error:
        raise UserError(f"--file {path} cannot be read: {error.strerror}", param="file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--file {path} is not UTF-8 text (byte {error.start})", param="file") from None
    return text


def _load_lines(name: str, subset: str | None, split: str) -> list[str]:
    way_out = "--file TEXT and --dataset builtin need no download"
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"--dataset {name} needs the datasets package: pip install 'octavo[hub]'; {way_out}", param="dataset"
        ) from None
    try:
        data = load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # unknown name, no access, no network, a broken download
        reason = str(error).strip().split("\n", 1)[0]
        raise UserError(f"data set {name!r} ({split}) cannot be loaded: {reason}; {way_out}", param="dataset") from None
    if "text" not in data.column_names:
        columns = ", ".join(data.column_names)
        raise UserError(f"data set {name!r} has no text column (it has {columns}); {way_out}", param="dataset")
    return list(data["text"])
