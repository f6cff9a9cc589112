"""One documented dataclass field is a command-line flag, an environment variable, a YAML key and a line of the docs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    default_factory: Callable[[], Any] | None = None,
    choices: Sequence[str] | None = None,
    positional: bool = False,
    short: str | None = None,
    metavar: str | None = None,
) -> Any:
    """Declare a dataclass field that users can set.

    `help` is one sentence; `choices` are the allowed values; `positional` makes it an argument without a flag;
    `short` is a one-letter flag such as "-q"; `metavar` names the value in the help.
    """
    metadata = {"help": help, "choices": tuple(choices) if choices else None, "positional": positional}
    metadata |= {"short": short, "metavar": metavar}
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
