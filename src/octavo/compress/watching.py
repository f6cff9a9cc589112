"""Seeing the inputs of linear layers while a block runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Group = dict[str, nn.Linear]  # layers that read the same input, by full name; known by the first of them


def in_stages(groups: list[Group]) -> list[list[Group]]:
    """Groups in the order in which they run; the same ones of all experts are one stage."""
    stages: dict[str, list[Group]] = {}
    for group in groups:
        stages.setdefault(re.sub(r"\d+", "*", next(iter(group))), []).append(group)
    return list(stages.values())


@contextmanager
def hooked(groups: list[Group], action: Callable[[Group, Tensor], None]) -> Iterator[None]:
    """Call `action(group, input)` before the first layer of each group runs."""
    handles = []
    for group in groups:

        def hook(module: nn.Module, args: tuple[Any, ...], group: Group = group) -> None:
            action(group, args[0])

        handles.append(next(iter(group.values())).register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _AllSeen(Exception):
    """Ends a pass that was only made to see inputs."""


def run_watched(
    run: Callable[[], Tensor], layers: dict[str, nn.Module], action: Callable[[str, Tensor], None], whole: bool
) -> Tensor | None:
    """`run()`, with `action(name, input)` before each of `layers` runs; what it gives, or None where it ended early.

    It ends as soon as all layers have been seen, unless it is to be `whole`.
    """
    left = set(layers)

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            action(name, args[0])
            left.discard(name)
            if not (left or whole):
                raise _AllSeen

        return hook

    handles = [layer.register_forward_pre_hook(hook_of(name)) for name, layer in layers.items()]
    try:
        return run()
    except _AllSeen:
        return None
    finally:
        for handle in handles:
            handle.remove()
