"""Reading a model's weights: names and shapes are checked before a value is used."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.quantization_config import class_of
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.transforms import OnlineTransform, online_transforms
from octavo.errors import CheckpointError, UnsupportedModelError, UserError
from octavo.layers.quantize import quantize_weight
from octavo.layers.rotation import Rotation, power_of_two_part, sylvester

Weight = Tensor | QuantizedWeight


class WeightSource:
    """A checkpoint as a model reads it: one call a parameter, with the shape that the configuration implies.

    Args:
        checkpoint: where the tensors are.
        dtype: dtype of dense tensors that are handed out.
        device: where dense tensors go.
        quantization: quantize plain linear weights while they are read (see `octavo.layers.quantize`).
        deterministic: layers are to multiply so that a row's result does not depend on the others (`ops.pack_weight`).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        quantization: str | None = None,
        deterministic: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = torch.device(device)
        self.quantization = quantization
        self.deterministic = deterministic
        self._transforms = online_transforms(checkpoint.config, checkpoint.path)
        self._rotations: dict[tuple[OnlineTransform, int], Rotation] = {}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A dense tensor in the model's dtype, or in `dtype`.

        `CheckpointError` names it when it is missing or has another shape.
        """
        if len(shape) == 2:
            self._refuse_rotated(name.removesuffix(".weight"))
        return self.checkpoint.tensor(name, shape).to(device=self.device, dtype=dtype or self.dtype)

    def weight(self, module: str, shape: tuple[int, int], rotates: bool = False) -> Weight:
        """The weight [out, in] of a linear module, quantized where the checkpoint (or `quantization`) has it so.

        `rotates`: the reader sees to the module's `rotation`. UserError where both the checkpoint and `quantization`
        would quantize.
        """
        if not rotates:
            self._refuse_rotated(module)
        value = self.checkpoint.weight(module, shape)
        if isinstance(value, QuantizedWeight):
            if self.quantization is not None:
                raise UserError(
                    f"quantization is {self.quantization!r}, but {self.checkpoint.path} holds quantized weights "
                    f"already ({module}); leave it out, or make a plain checkpoint first with `octavo convert`",
                    param="quantization",
                )
            return self._moved(value)
        return self.quantized(value)

    def quantized(self, weight: Tensor) -> Weight:
        """A dense weight [out, in] as a linear module is to have it: quantized where `quantization` says so."""
        if self.quantization is not None:
            return quantize_weight(weight.to(self.device), self.quantization)
        return self._moved(weight)

    def weight_as_stored(self, module: str, shape: tuple[int, int]) -> Weight:
        """The weight [out, in] of a module, never quantized on load."""
        self._refuse_rotated(module)
        return self._moved(self.checkpoint.weight(module, shape))

    def embedding(self, module: str, shape: tuple[int, int]) -> Weight:
        """The weight [vocabulary, hidden] of an embedding or output layer; never quantized on load."""
        self._refuse_rotated(module)
        return self._moved(self.checkpoint.weight(module, shape))

    def _moved(self, value: Weight) -> Weight:
        """A weight where it will be used, so that nothing is joined or reordered on the host for a GPU."""
        if isinstance(value, Tensor):
            return value.to(device=self.device, dtype=self.dtype)
        if value.codes.device == self.device:
            return value
        offset = None if value.offset is None else value.offset.to(self.device)
        order = None if value.order is None else value.order.to(self.device)
        codes, scale = value.codes.to(self.device), value.scale.to(self.device)
        return replace(value, codes=codes, scale=scale, offset=offset, order=order)

    def bias(self, module: str, size: int) -> Tensor:
        """The bias [size] of a linear module."""
        return self.tensor(f"{module}.bias", (size,))

    def rotation(self, module: str, location: str, size: int) -> Rotation | None:
        """What the checkpoint does to a linear module's "input" or "output" rows of `size` elements at run time."""
        found = [transform for transform in self._of(module) if transform.location == location]
        if not found:
            return None
        block = found[0].block or size
        known = found[0].kind != "hadamard" or power_of_two_part(block) == block
        if len(found) > 1 or size % block or not known:
            raise UnsupportedModelError(
                f"{self.checkpoint.path}: {len(found)} rotations of the {location} of {module}, which has {size} "
                f"elements, in blocks of {block}; one is done, in blocks that divide the size, and of a power of two "
                "for the type 'hadamard'"
            )
        if self.deterministic:
            raise UserError(
                f"deterministic is True, but the checkpoint rotates the {location} of {module} at run time, for which "
                "there is no deterministic kernel; leave it out",
                param="deterministic",
            )
        key = (found[0], size)
        if key not in self._rotations:
            factors = sylvester(block) if found[0].kind == "hadamard" else (self._stored(found[0], module, block),)
            moved = tuple(factor.to(device=self.device, dtype=torch.float32) for factor in factors)
            self._rotations[key] = Rotation(size, moved)
        return self._rotations[key]

    def _stored(self, transform: OnlineTransform, module: str, order: int) -> Tensor:
        """The matrix float64 [order, order] of a random transform: the module's, or that of all which share it."""
        end = f".{transform.name}_{transform.location}.weight"
        names = [name for name in self.checkpoint.names() if name.endswith(end)]
        for name in sorted(names, key=lambda name: name != module + end):
            matrix = self.checkpoint.tensor(name).to(torch.float64)
            if tuple(matrix.shape) == (order, order):
                if transform.kind == "random-matrix":
                    return matrix
                matrix = matrix / order**0.5
                return matrix.t() if transform.inverse else matrix
        raise CheckpointError(
            f"{self.checkpoint.path}: {module} rotates its {transform.location} by a {transform.kind} of order "
            f"{order}, but no tensor *{end} of that shape is stored"
        )

    def _of(self, module: str) -> list[OnlineTransform]:
        if not self._transforms or class_of(module) != "Linear":
            return []
        return [transform for transform in self._transforms if transform.concerns(module)]

    def _refuse_rotated(self, module: str) -> None:
        """Only `Linear` rotates rows; elsewhere a rotated weight would give wrong results."""
        if self._of(module):
            raise UnsupportedModelError(
                f"{self.checkpoint.path} rotates the rows of {module} at run time (transform_config), which is done "
                "for linear layers of attention and dense feed-forward only"
            )
