"""Products of a mixture of experts: each row passes through the few experts that were chosen for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.ops.experts_base import Activation, Expert, PackedExperts
from octavo.ops.functions import linear, pack_weight
from octavo.ops.packed_weight import PackedWeight, QuantizedWeightLike
from octavo.ops.triton import runtime, weights_experts


def experts(x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> Tensor:
    """sum_k weights[t, k] * down(activation(gate_up(x[t]))) of expert ids[t, k]: x [T, H] -> [T, H] in x's dtype.

    ids: int64 [T, K], different in a row; weights: float32 [T, K]. The sum is float32, rounded once.
    """
    return packed(x, ids, weights)


def pack_experts(
    given: Iterable[Expert],
    activation: Activation,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    deterministic: bool = False,
) -> PackedExperts:
    """Bring the experts' weights into the order of the fastest products for this device.

    `given` is read one expert at a time where each is packed by itself. `activation` maps [T, 2 I] to [T, I]; `dtype`
    is that of the inputs. deterministic: as for `pack_weight`.
    """
    device = torch.device(device)
    if device.type == "cuda" and runtime.unavailable() is None and not deterministic:
        given = list(given)
        if weights_experts.rejects(given) is None:
            return weights_experts.TritonExperts(given, activation, device)
    return ExpertLoop(given, activation, dtype, device, deterministic)


class ExpertLoop(PackedExperts):
    """The reference: one product after the other for each expert that has rows, in the experts' order."""

    def __init__(
        self,
        given: Iterable[Expert],
        activation: Activation,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        def pack(weight: Tensor | QuantizedWeightLike) -> PackedWeight:
            return pack_weight(weight, dtype, device, deterministic)

        self.activation = activation
        self.pairs = [([pack(part) for part in gate_up], pack(down)) for gate_up, down in given]
        self.num_experts = len(self.pairs)

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for gate_up, down in self.pairs for weight in (*gate_up, down))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            rows, place = torch.where(ids == expert)
            gate_up, down = self.pairs[expert]
            inner = [linear(x[rows], part) for part in gate_up]
            inner_rows = self.activation(inner[0] if len(inner) == 1 else torch.cat(inner, dim=1))
            out.index_add_(0, rows, linear(inner_rows, down).float() * weights[rows, place, None])
        return out.to(x.dtype)
