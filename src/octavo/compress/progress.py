"""The progress bar over the blocks of a model, with the error of what was just done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.compress.modifiers.base import LayerResult


@contextmanager
def block_progress(blocks: int) -> Iterator[Callable[[int, list[LayerResult]], None]]:
    """A callback for each finished block; nothing is shown where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda index, results: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = ("compressing", BarColumn(), "{task.completed}/{task.total} blocks", TimeElapsedColumn(), "left",
               TimeRemainingColumn(), TextColumn("{task.fields[error]}"))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=blocks, error="")

        def advance(index: int, results: list[LayerResult]) -> None:
            errors = [f"{result.name.rpartition('.')[2]} {result.error:.4f}" for result in results]
            bar.update(task, completed=index + 1, error="error " + " ".join(errors) if errors else "")

        yield advance
