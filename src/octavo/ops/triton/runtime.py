"""What the Triton kernels need to know about the machine, without importing triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def unavailable() -> str | None:
    """Why Triton kernels cannot run in this process, or None."""
    if not torch.cuda.is_available():
        return "torch finds no usable GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"needs compute capability 8.0 or later, this GPU has {capability[0]}.{capability[1]}"
    return None


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 elsewhere, where kernels run under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def lazy(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of `octavo.ops.triton.<module>`, imported when it is first called."""
    found: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(f"octavo.ops.triton.{module}"), name)
        return found(*args, **kwargs)

    return call
