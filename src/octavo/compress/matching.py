"""Which modules a recipe's strings mean: a full name, "re:" and a regular expression, or a class name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from octavo.errors import UserError


def matches(pattern: str, name: str, module: nn.Module) -> bool:
    """Whether `pattern` means the module. Regular expressions are anchored at the start only, as re.match does."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise UserError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern == name or any(pattern == kind.__name__ for kind in type(module).__mro__[:-1])


def matches_any(patterns: Iterable[str], name: str, module: nn.Module) -> bool:
    """Whether one of the patterns means the module."""
    return any(matches(pattern, name, module) for pattern in patterns)


def check_all_match(patterns: Iterable[str], modules: dict[str, nn.Module], what: str) -> list[str]:
    """Messages for patterns that mean no module at all: a typing error would else go unnoticed."""
    return [
        f"{what} {pattern!r} matches no module of this model"
        for pattern in patterns
        if not any(matches(pattern, name, module) for name, module in modules.items())
    ]
