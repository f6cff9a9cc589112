"""What a forward pass needs to know about the step it runs in."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.ops import AttentionMetadata


@dataclass(frozen=True)
class StepInputs:
    """The attention metadata of one step.

    Attributes:
        metadata: one `AttentionMetadata` a cache group, indexed by the group that the engine bound a layer to.
    """

    metadata: tuple[AttentionMetadata, ...]
