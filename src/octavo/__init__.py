"""Octavo: compress, serve, measure, evaluate and decide on open-weight language models.

The names below are loaded on first use, so that `import octavo` costs nothing (in particular, not torch).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo.version import __version__

_LAZY = {
    "LLM": "octavo.engine.llm",
    "SamplingParams": "octavo.core.sampling_params",
    "RequestOutput": "octavo.engine.outputs",
    "CompletionOutput": "octavo.engine.outputs",
    "oneshot": "octavo.compress.oneshot",
}

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__", "oneshot"]

if TYPE_CHECKING:
    from octavo.compress.oneshot import oneshot
    from octavo.core.sampling_params import SamplingParams
    from octavo.engine.llm import LLM
    from octavo.engine.outputs import CompletionOutput, RequestOutput


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
