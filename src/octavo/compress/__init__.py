"""Compression of models: `oneshot` for Python, `run` for the command line. Nothing heavy is imported before use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.compress.command import run
    from octavo.compress.job import CompressionResult
    from octavo.compress.oneshot import oneshot

__all__ = ["CompressionResult", "oneshot", "run"]
_HOMES = {"CompressionResult": "job", "oneshot": "oneshot", "run": "command"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'octavo.compress' has no attribute {name!r}")
    return getattr(importlib.import_module(f"octavo.compress.{_HOMES[name]}"), name)
