"""Compression of models. `octavo.oneshot` is the call for Python, `run` the one for the command line.

Nothing heavy is imported before use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.compress.command import run
    from octavo.compress.job import CompressionResult

__all__ = ["CompressionResult", "run"]
_HOMES = {"CompressionResult": "job", "run": "command"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'octavo.compress' has no attribute {name!r}")
    return getattr(importlib.import_module(f"octavo.compress.{_HOMES[name]}"), name)
