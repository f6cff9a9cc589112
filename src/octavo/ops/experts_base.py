"""What the experts' weights are, however they are packed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from octavo.ops.packed_weight import QuantizedWeightLike

Expert = tuple[Sequence[Tensor | QuantizedWeightLike], Tensor | QuantizedWeightLike]
"""Gate and up, merged [2 I, H] or in two parts, and down [H, I]."""
Activation = Callable[[Tensor], Tensor]


class PackedExperts(ABC):
    """The weights of E experts in the order that a kernel reads; made by `pack_experts`."""

    num_experts: int

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory that they occupy, with scales."""

    @abstractmethod
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `octavo.ops.experts`."""
