"""QuIPModifier: rotate the inputs, and the outputs, of single layers, as they are and at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from octavo.compress.blocks import Blocks
from octavo.compress.matching import check_all_match, matches_any
from octavo.compress.modifiers.base import Transform
from octavo.compress.modifiers.spinquant import check_kind, check_rotations
from octavo.compress.online import WHO_ROTATES, InputRotator, OnlineRotations, in_float32
from octavo.compress.schemes import as_tuple
from octavo.errors import UnsupportedModelError, UserError

_LOCATIONS = {"v": "input", "u": "output"}


@dataclass(kw_only=True)
class QuIPModifier(Transform):
    """Hadamard transforms around single linear layers (Tseng et al., "QuIP#", 2024, section 3).

    `rotations`: "v" turns a layer's input and "u" its output. The weight is turned to match, and the layer's rows are
    turned whenever it runs, which Octavo does for attention and dense feed-forward layers. Blocks are of the largest
    power of two that divides a layer's size, or of `transform_block_size`. `transform_type`: "hadamard", which runs
    fastest, "random-hadamard" (signs drawn by `seed`) or "random-matrix" (orthogonal). The argument names are LLM
    Compressor's, except seed.
    """

    targets: str | Sequence[str] = "Linear"
    ignore: str | Sequence[str] | None = "lm_head"
    rotations: Sequence[str] = ("v",)
    transform_type: str = "hadamard"
    transform_block_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.rotations = check_rotations(self.rotations, tuple(_LOCATIONS))
        check_kind(self.transform_type)
        self._online: dict[str, OnlineRotations] = {}

    def unused_patterns(self, modules: dict[str, nn.Module]) -> list[str]:
        patterns = [("target", as_tuple(self.targets)), ("ignore", as_tuple(self.ignore))]  # type: ignore[arg-type]
        return [note for what, names in patterns for note in check_all_match(names, modules, what)]

    def prepare(self, model: Any, blocks: Blocks) -> list[str]:
        targets, ignore = as_tuple(self.targets), as_tuple(self.ignore)  # type: ignore[arg-type]
        self._online = {
            name: OnlineRotations(name, _LOCATIONS[name], self.transform_type, self.transform_block_size, self.seed)
            for name in self.rotations
        }
        linears: set[str] = set()
        rotator = InputRotator()
        count = 0
        for index, block in enumerate(blocks.modules):
            if any("expert" in name for name, _ in block.named_modules()):
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {blocks.name(index)} has experts, whose rows are not rotated at run time;"
                    " QuIP is there for dense models, SpinQuantModifier with R1 and R2 for all"
                )
            for name, module in blocks.linears(index):
                linears.add(name)
                if matches_any(targets, name, module) and not matches_any(ignore, name, module):
                    self._rotate(name, module, rotator)
                    count += 1
        if not count:
            raise UserError("QuIPModifier's targets match no linear layer of the model's blocks", param="targets")
        for rotations in self._online.values():
            rotations.among(linears)
        return [f"QuIP: the rows of {count} layers are rotated at run time: {WHO_ROTATES}"]

    def _rotate(self, name: str, module: nn.Linear, rotator: InputRotator) -> None:
        if "v" in self._online:
            rotator.hook(module, self._online["v"].add(name, module.in_features))
        if "u" in self._online:
            outputs = self._online["u"].add(name, module.out_features)
            module.register_forward_hook(lambda layer, args, rows: in_float32(outputs.invert, rows))

    def read(self, module: nn.Module, name: str) -> None:
        for rotations in self._online.values() if name else ():
            rotations.turn_weights(module, name)

    def online(self) -> dict[str, Any]:
        """config_groups of transform_config: what is left to do at run time."""
        return {key: group for rotations in self._online.values() for key, group in rotations.groups().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The matrices of random rotations."""
        return {key: value for rotations in self._online.values() for key, value in rotations.tensors().items()}
