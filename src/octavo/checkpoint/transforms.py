"""Rotations that a checkpoint wants at run time: transform_config in compressed-tensors' quantization_config.

Its "weight_input" and "weight_output" parts are in the stored weights already; "input" and "output" are the layer's to
do. A deterministic Hadamard matrix needs none stored; a random one is, with the first layer of its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoint.config_fields import Fields
from octavo.checkpoint.quantization_config import best_match, quantization_fields
from octavo.errors import UnsupportedModelError

ONLINE = ("input", "output")
KINDS = ("hadamard", "random-hadamard", "random-matrix")
_FUSED = ("weight_input", "weight_output")


@dataclass(frozen=True)
class OnlineTransform:
    """The inputs or the outputs (`location`) of modules are multiplied by a matrix, in blocks of `block` neighbouring
    elements (None: all of them).

    Of the kind "hadamard" it is Sylvester's; the others are stored, under the group's `name`. A stored Hadamard matrix
    is of +1 and -1, and `inverse` takes its transpose; "random-matrix" is stored as it is used.
    """

    name: str
    kind: str
    inverse: bool
    location: str
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    block: int | None

    def concerns(self, module: str) -> bool:
        """Whether a linear module of this full name is transformed."""
        is_target = best_match(self.targets, module, "Linear") is not None
        return is_target and best_match(self.ignore, module, "Linear") is None


def online_transforms(config: dict[str, Any], path: Path) -> tuple[OnlineTransform, ...]:
    """Those of a config.json's content; UnsupportedModelError for one that is not done here."""
    fields = quantization_fields(config, path)
    transforms = None if fields is None else fields.within("transform_config")
    groups = None if transforms is None else transforms.within("config_groups")
    if groups is None:
        return ()
    parsed = [Fields(content, path, f"{groups.where}.{name}") for name, content in groups.content.items()]
    named = zip(groups.content, parsed, strict=True)
    return tuple(transform for name, group in named for transform in _group(name, group))


def _group(name: str, group: Fields) -> list[OnlineTransform]:
    parts = group.content.get("apply") or []
    if not isinstance(parts, list):
        raise group.wrong("apply", "a list")
    kind, block = group.text("type", "hadamard"), group.integer("head_dim")
    found = []
    for index, content in enumerate(parts):
        part = Fields(content, group.path, f"{group.where}.apply[{index}]")
        location = part.text("location", "")
        if location in _FUSED:
            continue
        if location not in ONLINE:
            raise UnsupportedModelError(
                f"{group.path}: {part.where} rotates {location!r} at run time, which is not done here; rotations of a "
                "linear layer's input and output are"
            )
        if kind not in KINDS or group.flag("randomize", False):
            raise UnsupportedModelError(
                f"{group.path}: {group.where} is a rotation of type {kind!r} at run time; {', '.join(KINDS)} without "
                "randomize are done here"
            )
        if block is not None and (block < 2 or (kind == "hadamard" and block & (block - 1))):
            raise group.wrong("head_dim", "a power of two, for that is what the type 'hadamard' has matrices of")
        targets, ignore = part.patterns("targets"), part.patterns("ignore")
        inverse = part.flag("inverse", False)
        found.append(OnlineTransform(name, kind, inverse, location, targets, ignore, block))
    return found


def refuse_online_transforms(config: dict[str, Any], path: Path, doing: str) -> None:
    """UnsupportedModelError where weights alone do not make the model; `doing` says what would lose the rest."""
    if online_transforms(config, path):
        raise UnsupportedModelError(
            f"{path} rotates inputs of its layers at run time (transform_config), so {doing} would change what it "
            "computes; start from the model that it was made of"
        )
