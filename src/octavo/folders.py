"""Folders that a command writes to."""

from __future__ import annotations

from pathlib import Path

from octavo.errors import UserError


def output_folder(name: str | Path) -> Path:
    """The folder, made with its parents where it is not there; UserError says why that cannot be done."""
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise UserError(
            f"output folder {folder} cannot be made: {reason}; name another with --output-dir", param="output_dir"
        ) from None
    return folder
