"""Folders that Octavo writes to."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.errors import UserError


def cache_folder() -> Path:
    """Octavo's cache: $OCTAVO_CACHE, else octavo under $XDG_CACHE_HOME or ~/.cache. It may not be there yet."""
    given = os.environ.get("OCTAVO_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo"


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
