"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType


class Progress:
    """Counts `total` things done; shows a bar on a terminal while used as a context manager."""

    def __init__(self, total: int, label: str, *, enabled: bool = True) -> None:
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

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
