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
from octavo.compress.online import WHO_ROTATES, InputRotator, in_float32, online_rotation, transform_groups
from octavo.compress.schemes import as_tuple
from octavo.errors import UnsupportedModelError, UserError
from octavo.layers.rotation import Rotation, rotated


@dataclass(kw_only=True)
class QuIPModifier(Transform):
    """Hadamard transforms around single linear layers (Tseng et al., "QuIP#", 2024, section 3).

    `rotations`: "v" turns a layer's input and "u" its output. The weight is turned to match, and the layer's rows are
    turned whenever it runs, which Octavo does for attention and dense feed-forward layers. Blocks are of the largest
    power of two that divides a layer's size, or of `transform_block_size`. `transform_type` is "hadamard" alone: a
    random one would have to be stored with every layer. The argument names are LLM Compressor's.
    """

    targets: str | Sequence[str] = "Linear"
    ignore: str | Sequence[str] | None = "lm_head"
    rotations: Sequence[str] = ("v",)
    transform_type: str = "hadamard"
    transform_block_size: int | None = None

    def __post_init__(self) -> None:
        self.rotations = check_rotations(self.rotations, ("v", "u"))
        check_kind(self.transform_type)
        if self.transform_type != "hadamard":
            raise UserError(
                f"transform_type is {self.transform_type!r}; QuIP's transforms run with the model, and those of the "
                "type 'hadamard' are done there",
                param="transform_type",
            )
        self._inputs: dict[str, Rotation] = {}
        self._outputs: dict[str, Rotation] = {}
        self._groups: dict[str, Any] = {}

    def unused_patterns(self, modules: dict[str, nn.Module]) -> list[str]:
        patterns = [("target", as_tuple(self.targets)), ("ignore", as_tuple(self.ignore))]  # type: ignore[arg-type]
        return [note for what, names in patterns for note in check_all_match(names, modules, what)]

    def prepare(self, model: Any, blocks: Blocks) -> list[str]:
        targets, ignore = as_tuple(self.targets), as_tuple(self.ignore)  # type: ignore[arg-type]
        self._inputs, self._outputs, self._groups = {}, {}, {}
        linears: set[str] = set()
        rotator = InputRotator()
        for index, block in enumerate(blocks.modules):
            if any("expert" in name for name, _ in block.named_modules()):
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {blocks.name(index)} has experts, whose rows are not rotated at run time;"
                    " QuIP is there for dense models, SpinQuantModifier with R1 and R2 for all"
                )
            for name, module in blocks.linears(index):
                linears.add(name)
                if matches_any(targets, name, module) and not matches_any(ignore, name, module):
                    self._add(name, module, rotator)
        if not linears or not (self._inputs or self._outputs):
            raise UserError("QuIPModifier's targets match no linear layer of the model's blocks", param="targets")
        for label, location, found in (("v", "input", self._inputs), ("u", "output", self._outputs)):
            sizes = {name: rotation.block for name, rotation in found.items()}
            self._groups |= transform_groups(label, location, sizes, linears)
        count = max(len(self._inputs), len(self._outputs))
        return [f"QuIP: the rows of {count} layers are rotated at run time: {WHO_ROTATES}"]

    def _add(self, name: str, module: nn.Linear, rotator: InputRotator) -> None:
        if "v" in self.rotations:
            rotation = online_rotation(module.in_features, self.transform_block_size, f"{name}'s input")
            self._inputs[name] = rotation
            rotator.hook(module, rotation)
        if "u" in self.rotations:
            outputs = online_rotation(module.out_features, self.transform_block_size, f"{name}'s output")
            self._outputs[name] = outputs
            module.register_forward_hook(lambda layer, args, rows: in_float32(outputs.invert, rows))

    def read(self, module: nn.Module, name: str) -> None:
        for found, dim in ((self._inputs, -1), (self._outputs, 0)):
            for full, rotation in found.items():
                if name and full.startswith(f"{name}."):
                    layer: Any = module.get_submodule(full.removeprefix(f"{name}."))
                    layer.weight.data.copy_(rotated(layer.weight.data, rotation, dim=dim))
                    if dim == 0 and isinstance(layer.bias, Tensor):
                        layer.bias.data.copy_(rotated(layer.bias.data, rotation))

    def online(self) -> dict[str, Any]:
        """config_groups of transform_config: what is left to do at run time."""
        return self._groups
