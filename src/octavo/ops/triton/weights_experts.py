"""Experts of one format in one tensor, multiplied by the kernel of `experts.py`. Imports no triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.ops.experts_base import Expert, PackedExperts
from octavo.ops.packed_weight import QuantizedWeightLike
from octavo.ops.triton import runtime

_sort_rows = runtime.lazy("experts", "sort_rows")
_grouped = runtime.lazy("experts", "grouped")
_ROWS_FOR_LARGE_TILES = 32  # rows an expert from which tiles of 64 rows are filled well enough


def rejects(given: Sequence[Expert]) -> str | None:
    """Why the kernel does not take these experts, or None."""
    if any(len(gate_up) != 1 for gate_up, _ in given):
        return "gate and up of an expert have different formats"
    for weights in ([gate_up[0] for gate_up, _ in given], [down for _, down in given]):
        if any(not isinstance(weight, Tensor) and weight.order is not None for weight in weights):
            return "columns are in an order of their own"
        if len({_format(weight) for weight in weights}) != 1:
            return "the experts have different formats"
        first = weights[0]
        if not isinstance(first, Tensor) and first.scheme.activations is not None:
            return "the inputs are to be rounded"
    return None


class TritonExperts(PackedExperts):
    """Gate and up [E, 2 I, H], and down [E, H, I]: dense, or codes with scales and offsets by group."""

    def __init__(self, given: Sequence[Expert], activation: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.num_experts = len(given)
        self.activation = activation
        self.gate_up = _stack([gate_up[0] for gate_up, _ in given], device)
        self.down = _stack([down for _, down in given], device)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (*self.gate_up, *self.down) if part is not None)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        num_pairs, top = ids.numel(), ids.shape[1]
        block = 64 if num_pairs >= _ROWS_FOR_LARGE_TILES * self.num_experts else 16
        tiles = _sort_rows(ids, self.num_experts, block)
        inner = self.activation(_grouped(x, *self.gate_up, tiles, None, num_pairs, top))
        shares = weights.float().flatten().contiguous()
        out = _grouped(inner, *self.down, tiles, shares, num_pairs, 1)
        return out.view(-1, top, x.shape[1]).sum(dim=1, dtype=torch.float32).to(x.dtype)


Stack = tuple[Tensor, Tensor | None, Tensor | None]


def _format(weight: Tensor | QuantizedWeightLike) -> tuple[object, ...]:
    if isinstance(weight, Tensor):
        return (tuple(weight.shape), weight.dtype)
    return (tuple(weight.shape), weight.codes.dtype, weight.scale.shape, weight.scale.dtype, weight.offset is None)


def _stack(weights: Sequence[Tensor | QuantizedWeightLike], device: torch.device) -> Stack:
    def stacked(parts: list[Tensor]) -> Tensor:
        return torch.stack([part.to(device) for part in parts])

    dense = [weight for weight in weights if isinstance(weight, Tensor)]
    if dense:
        return stacked(dense), None, None
    codes = [weight for weight in weights if not isinstance(weight, Tensor)]
    offsets = [weight.offset for weight in codes if weight.offset is not None]
    return stacked([w.codes for w in codes]), stacked([w.scale for w in codes]), stacked(offsets) if offsets else None
