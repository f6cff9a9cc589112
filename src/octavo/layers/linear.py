"""Linear layers over plain and quantized weights, and projections merged from several of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo import ops
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.errors import UnsupportedModelError
from octavo.layers.layer import Layer
from octavo.layers.rotation import Rotation
from octavo.layers.weights import Weight, WeightSource


class Linear(Layer):
    """`x W^T + b`, with the weight in the layout that serves fastest on its device.

    Several parts along the output dimension become one product where their formats agree. Parts in different formats
    (a recipe that left one projection unquantized) are kept apart and their outputs joined.

    Args:
        parts: weights [N_i, K], dense or quantized.
        bias: [sum N_i] or None.
        deterministic: a row's result does not depend on the others, bit by bit.
        rotations: what the rows x are rotated by first, and the outputs of each part afterwards.
    """

    def __init__(
        self,
        parts: Sequence[Weight],
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
        rotations: LinearRotations | None = None,
    ) -> None:
        super().__init__()
        self.rotations = rotations
        self.out_features = sum(part.shape[0] for part in parts)
        self.in_features = parts[0].shape[1]
        self.packed = [ops.pack_weight(weight, dtype, device, deterministic) for weight in merge_parts(parts)]
        self.bias = bias
        self.dtype, self.device = dtype, torch.device(device)

    @classmethod
    def load(
        cls, source: WeightSource, modules: Sequence[str], in_features: int, out_features: Sequence[int], bias: bool
    ) -> Linear:
        """Reads and merges the projections named `modules`, of `out_features` rows each."""
        sizes = list(zip(modules, out_features, strict=True))
        parts = [source.weight(module, (rows, in_features), rotates=True) for module, rows in sizes]
        joined = torch.cat([source.bias(module, rows) for module, rows in sizes]) if bias else None
        rotations = LinearRotations.load(source, sizes, in_features)
        return cls(parts, joined, source.dtype, source.device, source.deterministic, rotations)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., K] -> [..., N], in x's dtype."""
        rows = x.reshape(-1, self.in_features) if x.dim() != 2 else x
        if self.rotations is not None:
            rows = self.rotations.before(rows)
        if len(self.packed) == 1:
            out = ops.linear(rows, self.packed[0], self.bias)
        else:
            out = torch.cat([ops.linear(rows, packed, None) for packed in self.packed], dim=1)
            if self.bias is not None:
                out += self.bias
        if self.rotations is not None:
            out = self.rotations.after(out)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The dense weight [N, K], made anew at each call: for modeling code that looks at a layer's weight itself."""
        rows = [torch.arange(packed.shape[0], device=self.device) for packed in self.packed]
        return torch.cat([packed.rows(ids, self.dtype) for packed, ids in zip(self.packed, rows, strict=True)])

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as they are kept."""
        return sum(packed.num_bytes for packed in self.packed)

    def extra_repr(self) -> str:
        kinds = " + ".join(packed.describe() for packed in self.packed)
        return f"in={self.in_features}, out={self.out_features}, bias={self.bias is not None}, {kinds}"


class LinearRotations:
    """Rotations that a checkpoint wants around a linear layer, computed in float32 with plain products."""

    def __init__(self, inputs: Rotation | None, outputs: Sequence[Rotation | None], rows: Sequence[int]) -> None:
        self.inputs, self.outputs, self.sizes = inputs, outputs, list(rows)

    @classmethod
    def load(cls, source: WeightSource, modules: Sequence[tuple[str, int]], in_features: int) -> LinearRotations | None:
        """Those of modules (name, output rows) that share their input; None where there is none.

        UnsupportedModelError where the modules, which are one product, differ in the rotation of their input.
        """
        inputs = [source.rotation(name, "input", in_features) for name, _ in modules]
        outputs = [source.rotation(name, "output", rows) for name, rows in modules]
        if len({id(rotation) for rotation in inputs}) > 1:  # one that is shared is one object
            raise UnsupportedModelError(
                f"{source.checkpoint.path}: {', '.join(name for name, _ in modules)} read the same input, which the "
                "checkpoint rotates differently for them; such checkpoints are not served"
            )
        if inputs[0] is None and not any(outputs):
            return None
        return cls(inputs[0], outputs, [rows for _, rows in modules])

    def before(self, rows: Tensor) -> Tensor:
        """Inputs [T, K] as the stored weight wants them."""
        return rows if self.inputs is None else self.inputs.apply(rows.float()).to(rows.dtype)

    def after(self, rows: Tensor) -> Tensor:
        """The outputs [T, N] of the stored weight as the model wants them."""
        if not any(self.outputs):
            return rows
        parts = zip(rows.split(self.sizes, dim=1), self.outputs, strict=True)
        return torch.cat([p if r is None else r.apply(p.float()).to(p.dtype) for p, r in parts], dim=1)


def merge_parts(parts: Sequence[Weight]) -> list[Weight]:
    """One weight where all parts are dense, or all quantized by one scheme in one layout; otherwise the parts."""
    if len(parts) == 1:
        return list(parts)
    dense = [part for part in parts if isinstance(part, Tensor)]
    if len(dense) == len(parts):
        return [torch.cat(dense, dim=0)]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts) and len({_layout(part) for part in quantized}) == 1:
        return [QuantizedWeight.concat(quantized)]
    return list(parts)


def _layout(weight: QuantizedWeight) -> tuple[object, ...]:
    """What must agree for parts to share one packed weight."""
    scales = (weight.scale.shape[1], weight.scale.dtype, weight.offset is None, weight.input_scale is None)
    order = None if weight.order is None else tuple(weight.order.tolist())
    return (weight.scheme, weight.shape[1], order, *scales)
