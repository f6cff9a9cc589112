"""One operation, several implementations: an ordered list of candidates, each with what it can do.

The last candidate of each operation is the plain torch reference, which runs everywhere and defines the result. To add
a kernel (Triton on CUDA, say), add one `Candidate` to the list of its operation in `octavo.ops.functions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ANY: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """An implementation. `unavailable` says why it cannot run in this process, or is None.

    The function may return NotImplemented for arguments that it does not cover (a head size, an order of the cache);
    then the next candidate is called, so it must decide that before it writes anything.
    """

    name: str
    function: Callable[..., Any]
    devices: tuple[str, ...] = ANY
    dtypes: tuple[torch.dtype, ...] = ANY
    unavailable: str | None = None
    note: str = ""

    def rejects(self, device: str, dtype: torch.dtype) -> str | None:
        """Why it does not serve tensors of this kind, or None."""
        if self.unavailable is not None:
            return self.unavailable
        if self.devices and device not in self.devices:
            return f"serves {', '.join(self.devices)}, not {device}"
        if self.dtypes and dtype not in self.dtypes:
            return f"serves {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}"
        return None


class Operation:
    """A callable that runs the first candidate that serves its first argument's device and dtype."""

    def __init__(self, name: str, *candidates: Candidate) -> None:
        self.name = name
        self.candidates = candidates
        self._functions: dict[tuple[str, torch.dtype], tuple[Callable[..., Any], ...]] = {}

    def functions(self, device: str, dtype: torch.dtype) -> tuple[Callable[..., Any], ...]:
        return tuple(c.function for c in self.candidates if c.rejects(device, dtype) is None)

    def __call__(self, x: Tensor, *args: Any) -> Any:
        key = (x.device.type, x.dtype)
        functions = self._functions.get(key)
        if functions is None:
            functions = self._functions[key] = self.functions(*key)
        for function in functions:
            result = function(x, *args)
            if result is not NotImplemented:
                return result
        raise NotImplementedError(f"no candidate of {self.name} takes these arguments")

    def report(self, device: str, dtype: torch.dtype) -> list[tuple[str, str, bool, str]]:
        """(operation, candidate, chosen, reason) of each candidate, in order of preference."""
        rows = []
        taken = False
        for candidate in self.candidates:
            reason = candidate.rejects(device, dtype)
            chosen = reason is None and not taken
            if reason is None:
                reason = candidate.note if chosen else "a faster one serves this"
            taken = taken or chosen
            rows.append((self.name, candidate.name, chosen, reason))
        return rows
