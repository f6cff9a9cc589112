"""compressed-tensors' old sparse files, in which a weight is its kept values and a mask of where they are.

MODULE.compressed holds the values in row order ([N, K / 2] for 2:4, else flat), MODULE.bitmask uint8 [N, ceil(K / 8)]
the mask, lowest bit first, MODULE.shape [N, K]. The values may be quantized codes, with their scales beside them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.checkpoint.compressed_tensors import CompressedReader
from octavo.checkpoint.module_reader import ModuleReader, StoredTensors, module_of
from octavo.checkpoint.quantization_config import QuantizationConfig
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.errors import CheckpointError, UnsupportedModelError

FORMATS = ("sparse-24-bitmask", "sparse-bitmask")
PARTS = ("bitmask", "shape", "row_offsets")


class SparseReader(ModuleReader):
    """Fills in the zeros; what is quantized besides goes through compressed-tensors' own reader."""

    def __init__(self, config: QuantizationConfig, source: StoredTensors, path: Path) -> None:
        super().__init__(source)
        if config.sparsity not in FORMATS:
            raise UnsupportedModelError(
                f"{path}: the sparse format {config.sparsity!r} is not read; {' and '.join(FORMATS)} are. "
                "Use the dense checkpoint of the model"
            )
        self._inner = CompressedReader(config, self)

    def dense_name(self, name: str) -> str | None:
        module, _, part = name.rpartition(".")
        if part == "compressed":
            return f"{module}.weight"
        if part in PARTS and self._source.has_stored(f"{module}.compressed"):
            return None
        return self._inner.dense_name(name)

    def holds(self, name: str) -> bool:
        return self._inner.holds(name) or self._source.has_stored(f"{module_of(name)}.compressed")

    def stored_bits(self, name: str) -> int | None:
        return self._inner.stored_bits(name) if self._inner.holds(name) else None

    def read(self, name: str) -> QuantizedWeight | Tensor:
        return self._inner.read(name) if self._inner.holds(name) else self.stored(name)

    def has_stored(self, name: str) -> bool:
        return self._source.has_stored(name) or self._source.has_stored(f"{module_of(name)}.compressed")

    def stored(self, name: str) -> Tensor:
        """The tensor with its zeros."""
        module = module_of(name)
        if not module or not self._source.has_stored(f"{module}.compressed"):
            return self._source.stored(name)
        values, mask = self._source.stored(f"{module}.compressed"), self._source.stored(f"{module}.bitmask")
        shape = [int(size) for size in self._source.stored(f"{module}.shape").flatten()]
        if len(shape) != 2 or mask.dtype != torch.uint8 or tuple(mask.shape) != (shape[0], -(-shape[1] // 8)):
            raise CheckpointError(
                f"{module}.bitmask {mask.dtype} {list(mask.shape)} does not belong to {module}.shape {shape}"
            )
        kept = torch.from_numpy(np.unpackbits(mask.numpy(), axis=1, count=shape[1], bitorder="little")).bool()
        if int(kept.sum()) != values.numel():
            raise CheckpointError(
                f"{module}.compressed has {values.numel()} values, but {module}.bitmask has {int(kept.sum())} bits set"
            )
        # 8-bit floats cannot be written through a mask: bytes can, and zero is zero in both.
        as_bytes = values.view(torch.uint8) if values.element_size() == 1 else values
        full = torch.zeros(shape, dtype=as_bytes.dtype)
        full[kept] = as_bytes.flatten()
        return full.view(values.dtype)
