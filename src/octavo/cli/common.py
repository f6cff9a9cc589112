"""What several commands share: reading a configuration, printing JSON and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.plan.presets import find_preset


def read_config(model: str) -> dict[str, Any]:
    """The config of MODEL_OR_CONFIG. Only a GGUF file (and what resolves to one) needs the checkpoint reader."""
    from octavo.plan.source import load_config

    if model.lower().endswith(".gguf") and find_preset(model) is None:
        from octavo.checkpoint.reader import open_checkpoint

        return open_checkpoint(model).config
    return load_config(model)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = (), is_text: bool = False
) -> None:
    """A table, numbers aligned right (`is_text`: all left), then the notes, each wrapped to 100 characters."""
    import textwrap

    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or is_text else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(120, console.width))
    with console.capture() as rendered:  # printed by us, since rich ends the program when a pipe is closed
        console.print(table)
    print(rendered.get(), end="")
    for note in notes:
        print(textwrap.fill(note, 100))
