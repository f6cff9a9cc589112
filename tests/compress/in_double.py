"""A model written for float32, computed in float64; imports nothing of Octavo's, for other programs' environments.

Where inputs are rounded to 8 bits, two programs that compute the same in another order end far apart: an input close to
the middle between two levels goes one way here and the other there, and all layers after it see that. In float64 next
to no input is that close, so what is left of the difference is a difference of what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InDouble(TorchFunctionMode):
    """While this lasts, operations take what is float32 as float64, and make float64 where float32 is asked for.

    Kernels that read tensors by their address must not run meanwhile.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__set__"):  # of an attribute
            return func(*args, **(kwargs or {}))
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(_doubled, args), **{name: _doubled(value) for name, value in (kwargs or {}).items()})


def _doubled(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return type(value)(map(_doubled, value)) if type(value) in (list, tuple) else value


def in_single(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` without that mode: for what both programs take from a table in float32, as the angles of positions."""

    def outside(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*map(_single, args), **kwargs)

    return outside


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float64 else value
