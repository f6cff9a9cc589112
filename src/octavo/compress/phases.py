"""Where the time of a compression goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from octavo.ops.device import wait_for


class Phases:
    """Seconds by phase: `with phases("forward"): ...`. What a phase spends inside another is not counted twice.

    A phase ends when the device has done what was asked of it.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        wait_for(self._device)
        outer, self._inner = self._inner, 0.0
        started = time.perf_counter()
        try:
            yield
        finally:
            wait_for(self._device)
            spent = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner
            self._inner = outer + spent
