"""The base of the layers: `nn.Module` without what costs time at every call of a small model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from octavo.checkpoint.quantized import QuantizedWeight
from octavo.ops import PackedExperts, PackedWeight


class Layer(nn.Module):
    """A module whose call is its `forward`.

    A decoding step of a small model is some hundred calls of a few microseconds each. Hooks are not looked for, and
    tensors are plain attributes rather than registered buffers, which spares two dictionary searches at each use.
    Layers are built on their device and are not moved.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.__call__ = cls.__dict__["forward"]  # type: ignore[method-assign]


class Block:
    """A group of layers that is called as one; not a module, so that its parts are found at once."""


def weights_of(root: object) -> Iterator[Tensor | PackedWeight | PackedExperts | QuantizedWeight]:
    """Every weight below `root`, once each; KV caches and other state are none."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (Tensor, PackedWeight, PackedExperts, QuantizedWeight)):
            yield value
        elif isinstance(value, (nn.Module, Block)):
            pending.extend(vars(value).values())
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)


def weight_bytes(root: object) -> int:
    """Bytes of all weights below `root` as they are kept, a shared one counted once."""
    return sum(weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes for weight in weights_of(root))
