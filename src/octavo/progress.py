"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from time import perf_counter
from types import TracebackType

_SHOW_EVERY_SECONDS = 0.2


class Progress:
    """Counts things done; shows a bar on stderr, where that is a terminal, while used as a context manager.

    `total` is None while nobody knows it; `update` may bring it later. `unit` says what is counted ("blocks"); without
    one, the share in percent is shown. `from_caller` draws in `advance` and `update` alone and never from a thread of
    its own, for a caller whose measurement a thread would disturb.
    """

    def __init__(
        self, total: float | None, label: str, *, unit: str = "", enabled: bool = True, from_caller: bool = False
    ) -> None:
        self._bar = None
        self._from_caller, self._shown = from_caller, 0.0
        if enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            count = (MofNCompleteColumn(), unit) if unit else ("{task.percentage:>3.0f}%",)
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), *count, TimeElapsedColumn(), "left",
                       TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False))  # fmt: skip
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True, auto_refresh=not from_caller)
            self._task = self._bar.add_task(label, total=total, note="")

    def advance(self, note: str | None = None) -> None:
        """One more is done; `note` stands at the end of the line from now on."""
        if self._bar is not None:
            self._bar.advance(self._task)
            self._show(note)

    def update(self, done: float, total: float | None = None, note: str | None = None) -> None:
        """`done` are done, of `total` if that is new; `note` stands at the end of the line from now on."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            self._show(note)

    def _show(self, note: str | None) -> None:
        assert self._bar is not None
        if note is not None:
            self._bar.update(self._task, note=note)
        now = perf_counter()
        if self._from_caller and now - self._shown >= _SHOW_EVERY_SECONDS:
            self._shown = now
            self._bar.refresh()

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
