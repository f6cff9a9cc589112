"""SpinQuantModifier: rotate a model so that its weights and activations have no outliers left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from octavo.compress.blocks import Blocks
from octavo.compress.hadamard import rotation_of
from octavo.compress.modifiers.base import Transform
from octavo.compress.online import WHO_ROTATES, InputRotator, OnlineRotations
from octavo.compress.residual import AttentionLayout, BlockLayout, attention_layout, final_norm, residual_layout
from octavo.compress.rotation import turn_block, turn_ends, turn_values
from octavo.errors import UnsupportedModelError, UserError
from octavo.layers.rotation import Rotation

ROTATIONS = ("R1", "R2", "R3", "R4")
KINDS = ("hadamard", "random-hadamard", "random-matrix")
_DOWN = ("down_proj", "output_linear", "fc2", "c_proj")


@dataclass(kw_only=True)
class SpinQuantModifier(Transform):
    """Rotations by Hadamard matrices (Liu et al., "SpinQuant", 2024; Ashkboos et al., "QuaRot", 2024), not learned.

    `rotations`: R1 turns the residual stream and R2 the values of each head; both are multiplied into the weights and
    cost nothing later. R4 turns the input of the down projections at run time, in blocks of a power of two, which
    Octavo does for dense feed-forward layers. R3 turns queries and keys, which only helps a quantized KV cache: it is
    refused. `transform_type`: "hadamard", "random-hadamard" (signs drawn by `seed`) or "random-matrix" (orthogonal);
    at run time the first is fastest. `transform_block_size` mixes blocks of so many neighbours instead of whole rows in
    R1 and R4. The argument names are LLM Compressor's, except seed.
    """

    rotations: Sequence[str] = ("R1", "R2")
    transform_type: str = "hadamard"
    transform_block_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.rotations = check_rotations(self.rotations, ROTATIONS)
        if "R3" in self.rotations:
            raise UserError(
                "rotation R3 turns queries and keys at run time, which only helps where the KV cache is quantized with "
                "few bits; it is not there. Use R1, R2 and R4",
                param="rotations",
            )
        check_kind(self.transform_type)
        self._model: Any = None
        self._last_norm: tuple[str, nn.Module] = ("", nn.Identity())
        self._layouts: list[BlockLayout] = []
        self._values: list[AttentionLayout] = []
        self._down: OnlineRotations | None = None
        self._residual: Rotation | None = None
        self._head: Rotation | None = None

    @property
    def unties_embeddings(self) -> bool:  # type: ignore[override]
        return "R1" in self.rotations

    def unused_patterns(self, modules: dict[str, nn.Module]) -> list[str]:
        return []

    def prepare(self, model: Any, blocks: Blocks) -> list[str]:
        self._model = model
        notes: list[str | None] = []
        if "R1" in self.rotations:
            self._layouts, self._last_norm = residual_layout(model, blocks), final_norm(model, blocks)
            hidden = model.config.get_text_config().hidden_size
            self._residual, note = self._rotation(hidden, self.transform_block_size)
            notes += [note and f"R1: {note}", _untied(model)]
        if "R2" in self.rotations:
            self._values = attention_layout(model, blocks)
            self._head, note = self._rotation(self._values[0].head_dim, None)
            notes.append(note and f"R2: {note}")
        if "R4" in self.rotations:
            notes.append(self._prepare_down(model, blocks))
        return [note for note in notes if note]

    def _rotation(self, size: int, block: int | None) -> tuple[Rotation, str | None]:
        if block is not None and (block < 2 or size % block):
            raise UserError(
                f"transform_block_size is {block}; it must be at least 2 and divide the hidden size, {size}",
                param="transform_block_size",
            )
        return rotation_of(size, self.transform_type, self.seed, block)

    def _prepare_down(self, model: Any, blocks: Blocks) -> str:
        names: set[str] = set()
        rotator = InputRotator()
        self._down = OnlineRotations("R4", "input", self.transform_type, self.transform_block_size, self.seed)
        for index, block in enumerate(blocks.modules):
            found = [(name, module) for name, module in blocks.linears(index) if name.rpartition(".")[2] in _DOWN]
            if len(found) != 1 or any("expert" in name for name, _ in block.named_modules()):
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {blocks.name(index)} has {len(found)} down projections of a dense "
                    "feed-forward; rotation R4 is there for blocks with exactly one. Leave R4 out"
                )
            name, module = found[0]
            rotator.hook(module, self._down.add(name, module.in_features))
            names |= {full for full, _ in blocks.linears(index)}
        self._down.among(names)
        sizes = sorted({rotation.block for rotation in self._down.of.values()})
        return (
            f"R4: the input of {len(self._down.of)} down projections is rotated at run time, in blocks of "
            f"{', '.join(map(str, sizes))}: {WHO_ROTATES}"
        )

    def read(self, module: nn.Module, name: str) -> None:
        if not name:
            if self._residual is not None:
                turn_ends(self._model, *self._last_norm, self._residual)
            return
        index = int(name.rpartition(".")[2])
        if self._residual is not None:
            turn_block(module, self._layouts[index], self._residual, name)
        if self._head is not None:
            turn_values(module, self._values[index], self._head)
        if self._down is not None:
            self._down.turn_weights(module, name)

    def online(self) -> dict[str, Any]:
        """config_groups of transform_config: what is left to do at run time."""
        return {} if self._down is None else self._down.groups()

    def tensors(self) -> dict[str, Tensor]:
        """The matrices of random rotations at run time."""
        return {} if self._down is None else self._down.tensors()


def check_rotations(given: Sequence[str] | str, known: tuple[str, ...]) -> tuple[str, ...]:
    """A recipe's `rotations` as a tuple of known names."""
    rotations = (given,) if isinstance(given, str) else tuple(given)
    if not rotations or any(rotation not in known for rotation in rotations) or len(set(rotations)) < len(rotations):
        raise UserError(
            f"rotations is {list(rotations)}; it must be some of {', '.join(known)}, each once", param="rotations"
        )
    return rotations


def check_kind(kind: str) -> None:
    """UserError for an unknown transform_type."""
    if kind not in KINDS:
        raise UserError(f"transform_type is {kind!r}; it must be one of {', '.join(KINDS)}", param="transform_type")


def _untied(model: Any) -> str | None:
    output = model.get_output_embeddings()
    if output is None or output.weight is not model.get_input_embeddings().weight:
        return None
    return (
        "R1: the output layer gets a weight of its own, for the last norm's weight is moved into it; the embeddings "
        f"were tied, so {output.weight.numel():,} more elements are stored"
    )
