"""Rotations of a layer's rows that stay at run time: Hadamard transforms and random orthogonal matrices, in blocks.

Each is written into transform_config, where compressed-tensors' readers find it, and hooked into the model that is
calibrated, so that its layers see what they will be fed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.hadamard import rotation_of
from octavo.errors import UnsupportedModelError, UserError
from octavo.layers.rotation import Rotation, power_of_two_part, rotated

WHO_ROTATES = "Octavo does that, and vLLM on GPUs; transformers does not and computes something else"


class OnlineRotations:
    """The rotations of the rows of some layers at one `location`, "input" or "output", under one `name`.

    Rows are mixed in blocks of `block`, or of the largest power of two that divides their size; all blocks of a size
    are turned alike. A deterministic Hadamard matrix ("hadamard") runs fastest and need not be stored.
    """

    def __init__(self, name: str, location: str, kind: str, block: int | None, seed: int) -> None:
        self.name, self.location, self.kind, self.block, self.seed = name, location, kind, block, seed
        self.of: dict[str, Rotation] = {}
        self._linears: set[str] = set()

    def add(self, layer: str, size: int) -> Rotation:
        """The rotation of the rows, of `size` elements, of a layer of this full name."""
        block = self.block or power_of_two_part(size)
        what = f"the {self.location} of {layer}, {size} elements"
        if self.block is None and block < 2:
            raise UnsupportedModelError(f"no Hadamard transform mixes {what}: it is an odd number")
        base, missing = (None, None) if block < 2 or size % block else rotation_of(block, self.kind, self.seed)
        if base is None or missing or (self.kind == "hadamard" and power_of_two_part(block) != block):
            raise UserError(
                f"transform_block_size is {block}; it must divide {what}, and be a power of two for the transform_type "
                "'hadamard'",
                param="transform_block_size",
            )
        signs = None if base.signs is None else base.signs.repeat(size // block)
        self.of[layer] = Rotation(size, base.factors, signs)
        return self.of[layer]

    def among(self, linears: set[str]) -> None:
        """Take note of the names of all linear layers, from which those that are rotated must be told."""
        self._linears = linears

    def turn_weights(self, block: nn.Module, prefix: str) -> None:
        """Rotate the weights of those layers that are in a module of this full name, to match their rows."""
        for full, rotation in self.of.items():
            if full.startswith(f"{prefix}."):
                layer: Any = block.get_submodule(full.removeprefix(f"{prefix}."))
                is_output = self.location == "output"
                layer.weight.data.copy_(rotated(layer.weight.data, rotation, dim=0 if is_output else 1))
                if is_output and isinstance(layer.bias, Tensor):
                    layer.bias.data.copy_(rotated(layer.bias.data, rotation))

    def groups(self) -> dict[str, Any]:
        """config_groups of transform_config; a group has one block size.

        Layers are named by the ends of their names where these tell them from all others, else in full.
        """
        groups = {}
        for key, layers in self._by_block().items():
            online = {"ignore": [], "inverse": self.location == "output", "location": self.location}
            online["targets"] = _targets(layers, self._linears)
            fused = online | {"inverse": self.location == "input", "location": f"weight_{self.location}"}
            groups[key] = {
                "apply": [online, fused],
                "head_dim": self.of[layers[0]].block,
                "precision": "torch.float32",
                "randomize": False,
                "requires_grad": False,
                "type": self.kind,
            }
        return groups

    def tensors(self) -> dict[str, Tensor]:
        """The matrices that must be stored: of +1 and -1 for Hadamard ones, with the first layer of each block size."""
        stored = {}
        for key, layers in () if self.kind == "hadamard" else self._by_block().items():
            rotation = self.of[layers[0]]
            signs = None if rotation.signs is None else rotation.signs[: rotation.block]
            matrix = Rotation(rotation.block, rotation.factors, signs).matrix()
            if self.kind == "random-hadamard":
                stored[f"{layers[0]}.{key}_{self.location}.weight"] = matrix.sign().to(torch.bfloat16)
            else:  # as it is used: the output is turned back
                used = matrix.t().contiguous() if self.location == "output" else matrix
                stored[f"{layers[0]}.{key}_{self.location}.weight"] = used.to(torch.float32)
        return stored

    def _by_block(self) -> dict[str, list[str]]:
        """Group's name -> its layers."""
        by_block: dict[int, list[str]] = {}
        for layer, rotation in self.of.items():
            by_block.setdefault(rotation.block, []).append(layer)
        one = len(by_block) == 1
        return {self.name if one else f"{self.name}_{block}": layers for block, layers in by_block.items()}


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


def _targets(layers: list[str], linears: set[str]) -> list[str]:
    ends = {".".join(layer.split(".")[-2:]) for layer in layers}
    named = {linear for linear in linears if ".".join(linear.split(".")[-2:]) in ends}
    return [f"re:.*{end.replace('.', '[.]')}$" for end in sorted(ends)] if named == set(layers) else sorted(layers)
