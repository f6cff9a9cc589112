"""GPTQ checkpoints (AutoGPTQ, GPTQModel): packed along the inputs, with the zero point's offset of version 1.

qweight int32 [K * b / 32, N] is the transpose of compressed-tensors' packed weight; qzeros int32 [G, N * b / 32] are
packed along the outputs; scales [G, N]; g_idx int32 [K]. W[k, n] = scales[g_idx[k], n] * (q[k, n] - z[g_idx[k], n]).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.checkpoint.codes import column_order, from_packed_codes, unpacked
from octavo.checkpoint.config_fields import Fields
from octavo.checkpoint.module_reader import ModuleReader, StoredTensors, module_of
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import WeightScheme
from octavo.errors import CheckpointError, UnsupportedModelError

PARTS = ("qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class GPTQArguments:
    """bits and whether zero points may be away from the middle; the group size is read off the scales."""

    num_bits: int
    symmetric: bool


class GPTQConfig:
    """`quantization_config` with `quant_method` "gptq", checked."""

    def __init__(self, fields: Fields) -> None:
        self.path: Path = fields.path
        self.format = fields.text("checkpoint_format", "gptq")
        if self.format not in FORMATS:
            raise UnsupportedModelError(
                f"{fields.path}: the GPTQ format {self.format!r} is not read; {' and '.join(FORMATS)} are"
            )
        if (words := fields.text("pack_dtype", "int32")) != "int32":
            raise UnsupportedModelError(f"{fields.path}: GPTQ codes packed into {words} are not read; int32 is")
        self.overall = self._arguments(fields, GPTQArguments(4, True))
        dynamic = fields.within("dynamic")
        self._overrides = [] if dynamic is None else [self._override(dynamic, key) for key in dynamic.content]

    def of(self, module: str) -> GPTQArguments:
        """The arguments of a module: of the first override whose pattern matches its beginning, or the overall."""
        return next((found for pattern, found in self._overrides if re.match(pattern, module)), self.overall)

    def _override(self, dynamic: Fields, key: str) -> tuple[str, GPTQArguments]:
        pattern = key.removeprefix("+:").removeprefix("-:")
        dynamic.check_pattern(key, pattern)
        given = dynamic.within(key)
        return pattern, self.overall if given is None else self._arguments(given, self.overall)

    def _arguments(self, fields: Fields, default: GPTQArguments) -> GPTQArguments:
        bits = fields.integer("bits", default.num_bits) or 0
        if bits not in BITS:
            raise UnsupportedModelError(f"{fields.path}: {fields.where}.bits is {bits}; GPTQ is read with {BITS} bits")
        return GPTQArguments(bits, fields.flag("sym", default.symmetric))


class GPTQReader(ModuleReader):
    """Weights stay quantized, those in activation order (desc_act) with their columns sorted by group."""

    def __init__(self, fields: Fields, source: StoredTensors) -> None:
        super().__init__(source)
        self.config = GPTQConfig(fields)

    def dense_name(self, name: str) -> str | None:
        module, _, part = name.rpartition(".")
        if part == "qweight":
            return f"{module}.weight"
        return None if part in PARTS and self.holds(f"{module}.weight") else name

    def holds(self, name: str) -> bool:
        module = module_of(name)
        return bool(module) and self._source.has_stored(f"{module}.qweight")

    def stored_bits(self, name: str) -> int:
        return self.config.of(module_of(name)).num_bits

    def read(self, name: str) -> QuantizedWeight | Tensor:
        module = module_of(name)
        given, packed = self.config.of(module), self._source.stored(f"{module}.qweight")
        scale = self._source.stored(f"{module}.scales")
        if packed.dim() != 2 or scale.dim() != 2 or packed.dtype != torch.int32:
            raise CheckpointError(
                f"{module}.qweight {packed.dtype} {list(packed.shape)} and {module}.scales {list(scale.shape)} must "
                "have two dimensions, and the former int32"
            )
        columns, rows = packed.shape[0] * 32 // given.num_bits, packed.shape[1]
        groups = scale.shape[0]
        if scale.shape[1] != rows or groups == 0 or columns % groups:
            raise CheckpointError(
                f"{module}.scales has shape {list(scale.shape)}; a weight of {rows} x {columns} needs a number of "
                f"groups that divides {columns}, and {rows} scales in each"
            )
        zero = self._zero_point(module, given, rows, groups)
        if zero is not None and given.symmetric and not bool(zero.any()):
            zero = None
        order = self._order(module, columns, groups)
        scheme = _scheme(given.num_bits, zero is None, columns, groups)
        transposed = packed.T.contiguous()
        found = from_packed_codes(f"{module}.qweight", transposed, scheme, (rows, columns), scale.T, zero, order)
        if isinstance(found, Tensor):
            self.note_dense(f"GPTQ {given.num_bits}-bit (uneven groups or an odd row)")
        return found

    def _zero_point(self, module: str, given: GPTQArguments, rows: int, groups: int) -> Tensor | None:
        """[N, G], signed like the codes. Version 1 stores each less one, modulo the range."""
        name, bits = f"{module}.qzeros", given.num_bits
        stored = self._source.stored(name)
        if stored.dim() != 2 or stored.shape[0] != groups:
            raise CheckpointError(f"{name} has shape {list(stored.shape)}; its first dimension must be {groups}")
        half = 1 << (bits - 1)
        unsigned = unpacked(name, stored, bits, rows).to(torch.int16) + half
        if self.config.format == "gptq":
            unsigned = (unsigned + 1) % (1 << bits)
        return (unsigned - half).T

    def _order(self, module: str, columns: int, groups: int) -> Tensor | None:
        name = f"{module}.g_idx"
        if not self._source.has_stored(name):
            return None
        return column_order(name, self._source.stored(name), columns, groups)


def _scheme(bits: int, symmetric: bool, columns: int, groups: int) -> WeightScheme:
    if groups == 1:
        return WeightScheme(bits, symmetric=symmetric, strategy="channel")
    return WeightScheme(bits, symmetric=symmetric, strategy="group", group_size=columns // groups)
