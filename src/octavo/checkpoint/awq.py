"""AWQ checkpoints of the GEMM kind: packed along the outputs, eight nibbles of a word in an order of their own.

qweight int32 [K, N / 8]; qzeros int32 [G, N / 8]; scales [G, N]. W[k, n] = scales[g, n] * (q[k, n] - z[g, n]).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.checkpoint.codes import from_signed_codes
from octavo.checkpoint.config_fields import Fields
from octavo.checkpoint.module_reader import ModuleReader, StoredTensors, module_of
from octavo.checkpoint.packing import row_bytes
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import WeightScheme
from octavo.errors import CheckpointError, UnsupportedModelError

PARTS = ("qzeros", "scales")
COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word, lowest first, holds this one of its eight columns


class AWQReader(ModuleReader):
    """4-bit groups with zero points, which stay quantized."""

    def __init__(self, fields: Fields, source: StoredTensors) -> None:
        super().__init__(source)
        version = (fields.text("version", "") or fields.text("format", "gemm")).lower()
        if version != "gemm":
            raise UnsupportedModelError(f"{fields.path}: AWQ weights of the version {version!r} are not read; gemm is")
        bits = fields.integer("bits", fields.integer("w_bit", 4))
        if bits != 4:
            raise UnsupportedModelError(f"{fields.path}: {fields.where}.bits is {bits}; AWQ is read with 4 bits")

    def dense_name(self, name: str) -> str | None:
        module, _, part = name.rpartition(".")
        if part == "qweight":
            return f"{module}.weight"
        return None if part in PARTS and self.holds(f"{module}.weight") else name

    def holds(self, name: str) -> bool:
        module = module_of(name)
        return bool(module) and self._source.has_stored(f"{module}.qweight")

    def stored_bits(self, name: str) -> int:
        return 4

    def read(self, name: str) -> QuantizedWeight | Tensor:
        module = module_of(name)
        codes = self._signed(f"{module}.qweight")
        scale = self._source.stored(f"{module}.scales")
        columns, rows = codes.shape
        groups = scale.shape[0] if scale.dim() == 2 else 0
        if groups == 0 or scale.shape[1] != rows or columns % groups:
            raise CheckpointError(
                f"{module}.scales has shape {list(scale.shape)}; a weight of {rows} x {columns} needs a number of "
                f"groups that divides {columns}, and {rows} scales in each"
            )
        zero = self._zero_point(f"{module}.qzeros", (groups, rows))
        strategy, size = ("channel", None) if groups == 1 else ("group", columns // groups)
        scheme = WeightScheme(4, symmetric=zero is None, strategy=strategy, group_size=size)
        return from_signed_codes(scheme, codes.T.contiguous(), scale.T, None if zero is None else zero.T)

    def _zero_point(self, name: str, shape: tuple[int, int]) -> Tensor | None:
        if not self._source.has_stored(name):
            return None
        zero = self._signed(name)
        if tuple(zero.shape) != shape:
            raise CheckpointError(f"{name} holds {list(zero.shape)} zero points; {list(shape)} are needed")
        return zero

    def _signed(self, name: str) -> Tensor:
        """int32 [R, N / 8] -> int8 [R, N] of codes less 8."""
        words = self._source.stored(name)
        if words.dim() != 2 or words.dtype != torch.int32:
            raise CheckpointError(f"{name} is {words.dtype} {list(words.shape)}; it must be int32 with two dimensions")
        octets = row_bytes(words)
        nibbles = torch.stack((octets & 15, octets >> 4), dim=-1).view(words.shape[0], words.shape[1], 8)
        codes = torch.empty_like(nibbles)
        codes[:, :, list(COLUMN_OF_NIBBLE)] = nibbles
        return (codes.flatten(1).to(torch.int16) - 8).to(torch.int8)
