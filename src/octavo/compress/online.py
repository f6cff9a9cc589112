"""Rotations of a layer's rows that stay at run time: Hadamard transforms in blocks of a power of two.

Each is written into transform_config, where compressed-tensors' readers find it, and hooked into the model that is
calibrated, so that its layers see what they will be fed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedModelError, UserError
from octavo.layers.rotation import Rotation, power_of_two_part, sylvester

WHO_ROTATES = "Octavo does that, and vLLM on GPUs; transformers does not and computes something else"


def online_rotation(size: int, block: int | None, name: str) -> Rotation:
    """A Hadamard transform of rows of `size` elements, in blocks of `block`, or of the largest power of two."""
    if block is None:
        block = power_of_two_part(size)
        if block < 2:
            raise UnsupportedModelError(f"{name} has {size} elements, an odd number, which no Hadamard transform mixes")
    if block < 2 or power_of_two_part(block) != block or size % block:
        raise UserError(
            f"transform_block_size is {block}; a rotation at run time needs a power of two that divides {size}, the "
            f"elements of {name}",
            param="transform_block_size",
        )
    return Rotation(size, sylvester(block))


class InputRotator:
    """Forward pre-hooks that rotate the inputs of layers. Layers that are called with the same tensor get the same
    rotated tensor, so that they still are seen to share their input."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, Tensor] | None = None

    def hook(self, layer: nn.Module, rotation: Rotation) -> None:
        """Rotate what `layer` is called with from now on."""

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            given = args[0]
            if self._last is None or self._last[0] is not given or self._last[1] != rotation.block:
                self._last = (given, rotation.block, in_float32(rotation.apply, given))
            return (self._last[2], *args[1:])

        layer.register_forward_pre_hook(before)


def in_float32(turn: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """`turn(rows)` computed in float32, in the dtype of the rows."""
    return turn(rows.to(torch.float32)).to(rows.dtype)


def transform_groups(
    name: str, location: str, blocks: Mapping[str, int], linears: set[str], precision: str = "torch.float32"
) -> dict[str, Any]:
    """config_groups of transform_config for layers (full name -> block) whose "input" or "output" is rotated.

    A group has one block size. Layers are named by the ends of their names where these tell them from all other
    `linears`, else in full.
    """
    by_block: dict[int, list[str]] = {}
    for layer, block in blocks.items():
        by_block.setdefault(block, []).append(layer)
    groups = {}
    for block, layers in by_block.items():
        targets = _targets(layers, linears)
        online = {"ignore": [], "inverse": location == "output", "location": location, "targets": targets}
        fused = online | {"inverse": location == "input", "location": f"weight_{location}"}
        groups[name if len(by_block) == 1 else f"{name}_{block}"] = {
            "apply": [online, fused],
            "head_dim": block,
            "precision": precision,
            "randomize": False,
            "requires_grad": False,
            "type": "hadamard",
        }
    return groups


def _targets(layers: list[str], linears: set[str]) -> list[str]:
    ends = {".".join(layer.split(".")[-2:]) for layer in layers}
    named = {linear for linear in linears if ".".join(linear.split(".")[-2:]) in ends}
    return [f"re:.*{end.replace('.', '[.]')}$" for end in sorted(ends)] if named == set(layers) else sorted(layers)
