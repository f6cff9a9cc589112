"""Compression of models: `oneshot` for Python, `run` for the command line. Nothing heavy is imported before use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.compress.oneshot import CompressionResult, oneshot, run

__all__ = ["CompressionResult", "oneshot", "run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'octavo.compress' has no attribute {name!r}")
    return getattr(importlib.import_module("octavo.compress.oneshot"), name)
