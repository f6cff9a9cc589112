"""Typed reading of a JSON object that others wrote: what has the wrong type is named, with its value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError


class Fields:
    """The keys of one object within `path`'s configuration; `where` is its dotted place there.

    A key that is missing or null takes the default. A value of another type is a CheckpointError.
    """

    def __init__(self, content: object, path: Path, where: str) -> None:
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: {where} is {content!r}; it must be an object")
        self.content: dict[str, Any] = content
        self.path, self.where = path, where

    def within(self, key: str) -> Fields | None:
        """The object under `key`; None when there is none, or an empty one."""
        value = self.content.get(key)
        return Fields(value, self.path, f"{self.where}.{key}") if value else None

    def integer(self, key: str, default: int | None = None) -> int | None:
        value = self.content.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or int(value) != value:
            raise self.wrong(key, "an integer")
        return int(value)

    def text(self, key: str, default: str) -> str:
        value = self.content.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value or default

    def flag(self, key: str, default: bool) -> bool:
        """true or false; whatever else is not null counts by its truth, as "local" does for true."""
        value = self.content.get(key)
        return default if value is None else bool(value)

    def patterns(self, key: str) -> tuple[str, ...]:
        """A list of names and "re:" patterns; each pattern must be a regular expression."""
        value = self.content.get(key) or []
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(key, "a list of strings")
        for entry in value:
            if entry.startswith("re:"):
                self.check_pattern(key, entry[3:])
        return tuple(value)

    def check_pattern(self, key: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(
                f"{self.path}: {self.where}.{key} has {pattern!r}, which is no regular expression ({error})"
            ) from error

    def pair(self, key: str) -> tuple[int, int] | None:
        """Two positive integers: [128, 128] or "128x128"; None when there are none."""
        value = self.content.get(key)
        if value is None:
            return None
        parts = value.split("x") if isinstance(value, str) else value
        if isinstance(parts, (list, tuple)) and len(parts) == 2:
            found = [int(part) for part in parts if str(part).isdigit() and int(part) > 0]
            if len(found) == 2:
                return found[0], found[1]
        raise self.wrong(key, "two positive integers")

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.where}.{key} is {self.content.get(key)!r}; it must be {wanted}")
