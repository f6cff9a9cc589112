"""What reads the quantized tensors of one checkpoint, whatever the method."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from octavo.checkpoint.quantized import QuantizedWeight

logger = logging.getLogger(__name__)


class StoredTensors(Protocol):
    """Where the stored tensors come from. `stored` raises CheckpointError for a name that is not there."""

    def stored(self, name: str) -> Tensor: ...

    def has_stored(self, name: str) -> bool: ...


class ModuleReader(ABC):
    """Decodes what a quantization method stored in place of a dense tensor. What is stored decides, no ignore list."""

    def __init__(self, source: StoredTensors) -> None:
        self._source = source
        self._noted: set[str] = set()

    @abstractmethod
    def dense_name(self, name: str) -> str | None:
        """The dense tensor that a stored one stands for; None for a part that is read together with another."""

    @abstractmethod
    def holds(self, name: str) -> bool:
        """Whether the dense tensor `name` is stored quantized."""

    @abstractmethod
    def stored_bits(self, name: str) -> int | None:
        """Bits of a code of the tensor `name`, which is held; None where its values are stored plain."""

    @abstractmethod
    def read(self, name: str) -> QuantizedWeight | Tensor:
        """The tensor `name`: quantized in memory where the layout has a place for it, else dense, in float32."""

    def note(self, what: str) -> None:
        """Log, once a checkpoint, what is served otherwise than it is stored."""
        if what not in self._noted:
            self._noted.add(what)
            logger.info("%s", what)

    def note_dense(self, what: str) -> None:
        """Log that no kernel serves weights of this kind."""
        self.note(f"{what} weights are dequantized to the model's dtype while loading: no kernel serves them")


def module_of(name: str) -> str:
    """ "a.b.weight" -> "a.b"; "" for a tensor that is no module's weight."""
    return name.removesuffix(".weight") if name.endswith(".weight") else ""
