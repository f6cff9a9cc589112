"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType


class Progress:
    """Counts things done; shows a bar on stderr, where that is a terminal, while used as a context manager.

    `total` is None while nobody knows it; `update` may bring it later.
    """

    def __init__(self, total: int | None, label: str, *, enabled: bool = True) -> None:
        self._bar = None
        if enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(label, total=total)

    def advance(self) -> None:
        """One more is done."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def update(self, done: int, total: int) -> None:
        """`done` of `total` are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
