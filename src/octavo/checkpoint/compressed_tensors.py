"""compressed-tensors' tensors of a module -> a weight in the in-memory layout, or dense where it has no place there."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from octavo.checkpoint.packing import packed_columns, packed_to_memory, unpack_codes
from octavo.checkpoint.quantization_config import QuantizationConfig, QuantizationGroup
from octavo.checkpoint.quantized import QuantizedWeight, pack_nibbles, stays_quantized
from octavo.checkpoint.scheme import WeightScheme
from octavo.errors import CheckpointError, UnsupportedModelError

# Stored names that belong to a quantized weight, besides "weight" itself.
PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class StoredTensors(Protocol):
    """Where the stored tensors come from."""

    def stored(self, name: str) -> Tensor: ...

    def has_stored(self, name: str) -> bool: ...


class CompressedReader:
    """Decodes the modules of one checkpoint. What is stored decides whether a module is compressed, not `ignore`."""

    def __init__(self, config: QuantizationConfig, source: StoredTensors) -> None:
        self.config = config
        self._source = source

    def is_compressed(self, module: str) -> bool:
        return any(self._source.has_stored(f"{module}.{part}") for part in ("weight_packed", "weight_scale"))

    def read(self, module: str) -> QuantizedWeight | Tensor:
        """4 and 8 integer bits by group, channel or tensor, and E4M3 by channel or tensor, stay quantized.

        The rest comes dense, in float32. Static activations bring the one scale of the layer's input.
        """
        weight = self._read(module)
        if isinstance(weight, QuantizedWeight):
            weight.input_scale = self._input_scale(module, weight.scheme)
        return weight

    def _input_scale(self, module: str, scheme: WeightScheme) -> float | None:
        """The static scale of the layer's input, or None where its scheme scales each token."""
        activations = scheme.activations
        if activations is None or activations.dynamic:
            return None
        name = f"{module}.input_scale"
        if not self._source.has_stored(name):
            raise CheckpointError(f"{module}: its activations are static, but {name} is not stored")
        scale = self._source.stored(name)
        if scale.numel() != 1 or not 0 < float(scale) < float("inf"):
            raise CheckpointError(f"{name} must be one positive number; it has shape {list(scale.shape)}")
        return float(scale)

    def _read(self, module: str) -> QuantizedWeight | Tensor:
        group = self.config.group_of(module)
        if group is None:
            raise CheckpointError(
                f"module {module!r} is stored quantized, but no group of quantization_config has a target for it"
            )
        if self._source.has_stored(f"{module}.weight_packed"):
            return self._read_packed(module, group)
        weight = self._source.stored(f"{module}.weight")
        if weight.dtype in FLOAT8:
            return self._read_float(module, weight, group)
        if weight.dtype != torch.int8:
            return weight  # fake-quantized: the values are already there
        rows, columns = weight.shape
        scale = self._scale(module, group.scheme, rows, columns)
        return from_signed_codes(
            group.scheme, weight, scale, self._zero_point(module, group.scheme, rows, scale.shape[1])
        )

    def _read_float(self, module: str, weight: Tensor, group: QuantizationGroup) -> QuantizedWeight | Tensor:
        if weight.dtype != torch.float8_e4m3fn or group.scheme.type != "float" or not stays_quantized(group.scheme):
            return _scaled(module, weight.to(torch.float32), self._source.stored(f"{module}.weight_scale"), group)
        rows, columns = weight.shape
        scale = self._scale(module, group.scheme, rows, columns)
        return in_memory(group.scheme, (rows, columns), weight, scale, None)

    def _read_packed(self, module: str, group: QuantizationGroup) -> QuantizedWeight | Tensor:
        packed = self._source.stored(f"{module}.weight_packed")
        if group.scheme.type != "int" or packed.dtype != torch.int32:
            raise UnsupportedModelError(
                f"{module}: the format {group.format!r} ({group.scheme.num_bits}-bit {group.scheme.type}) is not read; "
                "pack-quantized, int-quantized and float-quantized are"
            )
        shape = self._source.stored(f"{module}.weight_shape").tolist()
        if len(shape) != 2 or shape[0] != packed.shape[0]:
            raise CheckpointError(
                f"{module}.weight_packed has shape {list(packed.shape)}, but {module}.weight_shape says {shape}"
            )
        return self._unpack(module, group.scheme, packed, (shape[0], shape[1]))

    def _unpack(
        self, module: str, scheme: WeightScheme, packed: Tensor, shape: tuple[int, int]
    ) -> QuantizedWeight | Tensor:
        rows, columns = shape
        scale = self._scale(module, scheme, rows, columns)
        zero = self._zero_point(module, scheme, rows, scale.shape[1])
        order = self._column_order(module, columns, scale.shape[1])
        name, bits = f"{module}.weight_packed", scheme.num_bits
        if order is not None:
            return _gathered(_unpacked(name, packed, bits, columns), scale, zero, order)
        if bits in (4, 8) and packed.shape[1] == packed_columns(columns, bits) and columns * bits % 8 == 0:
            return in_memory(scheme, shape, packed_to_memory(packed, bits, columns), scale, zero)
        return from_signed_codes(scheme, _unpacked(name, packed, bits, columns), scale, zero)

    def _column_order(self, module: str, columns: int, groups: int) -> Tensor | None:
        """The group of each column where an activation order was kept; None when they follow each other."""
        name = f"{module}.weight_g_idx"
        if not self._source.has_stored(name):
            return None
        order = self._source.stored(name).to(torch.int64)
        if tuple(order.shape) != (columns,) or int(order.min()) < 0 or int(order.max()) >= groups:
            raise CheckpointError(
                f"{name} {list(order.shape)} must give each of {columns} columns one of {groups} groups"
            )
        return None if torch.equal(order, _even_groups(columns, groups)) else order

    def _scale(self, module: str, scheme: WeightScheme, rows: int, columns: int) -> Tensor:
        """[N, G], whatever the strategy."""
        name = f"{module}.weight_scale"
        scale = self._source.stored(name)
        if scheme.strategy == "tensor" and scale.numel() == 1:
            return scale.reshape(1, 1).expand(rows, 1).contiguous()
        if scale.dim() == 1 and scheme.strategy == "channel":
            scale = scale.unsqueeze(1)
        wanted = (rows, scheme.num_groups(columns))
        if tuple(scale.shape) != wanted:
            raise CheckpointError(
                f"{name} has shape {list(scale.shape)}; a weight of {rows} x {columns} with {scheme.strategy} scales "
                f"needs {list(wanted)}"
            )
        return scale

    def _zero_point(self, module: str, scheme: WeightScheme, rows: int, groups: int) -> Tensor | None:
        """[N, G], signed like the codes; None for a symmetric weight."""
        name = f"{module}.weight_zero_point"
        if scheme.symmetric or not self._source.has_stored(name):
            return None
        zero = self._source.stored(name)
        if zero.dtype == torch.int32 and self._source.has_stored(f"{module}.weight_packed"):
            if zero.dim() != 2 or zero.shape[1] != groups:
                raise CheckpointError(f"{name} has shape {list(zero.shape)}; its second dimension must be {groups}")
            return _unpacked(name, zero.T.contiguous(), scheme.num_bits, rows).T
        if zero.numel() == 1:
            return zero.reshape(1, 1).expand(rows, groups)
        if zero.numel() != rows * groups:
            raise CheckpointError(f"{name} has shape {list(zero.shape)}; it must be [{rows}, {groups}]")
        return zero.reshape(rows, groups)


def _unpacked(name: str, packed: Tensor, bits: int, columns: int) -> Tensor:
    try:
        return unpack_codes(packed, bits, columns)
    except CheckpointError as error:
        raise CheckpointError(f"{name} of shape {list(packed.shape)} does not fit: {error}") from error


def from_signed_codes(
    scheme: WeightScheme, codes: Tensor, scale: Tensor, zero: Tensor | None = None
) -> QuantizedWeight | Tensor:
    """Signed codes int8 [N, K], scale [N, G] and zero point [N, G] (signed like the codes) -> the in-memory layout.

    W = scale * (code - zero). Bit widths other than 4 and 8, or an odd K with 4 bits, give the dense weight in float32.
    """
    rows, columns = codes.shape
    if scheme.num_bits not in (4, 8) or (scheme.num_bits == 4 and columns % 2):
        return _gathered(codes, scale, zero, _even_groups(columns, scale.shape[1]))
    stored = pack_nibbles((codes + 8).to(torch.uint8)) if scheme.num_bits == 4 else codes.contiguous()
    return in_memory(scheme, (rows, columns), stored, scale, zero)


def _even_groups(columns: int, groups: int) -> Tensor:
    return torch.arange(columns) // (columns // groups)


def in_memory(
    scheme: WeightScheme, shape: tuple[int, int], stored: Tensor, scale: Tensor, zero: Tensor | None
) -> QuantizedWeight:
    """4- or 8-bit codes that are in the in-memory layout already, with scale and zero point as in the checkpoint."""
    if scheme.strategy == "tensor":
        scheme = replace(scheme, strategy="channel")
    if zero is None and not scheme.symmetric:
        zero = torch.zeros_like(scale)
    shift = 8 if scheme.num_bits == 4 else 0
    offset = None
    if zero is not None:
        # z * scale needs more bits than a 16-bit scale has.
        scale = scale.to(torch.float32)
        offset = -(zero.to(torch.float32) + shift) * scale
    elif shift:
        offset = scale * -shift
    return QuantizedWeight(scheme, shape, stored, scale, offset)


def _gathered(codes: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor) -> Tensor:
    """Dense float32 weight with column k in group order[k]."""
    weight = codes.to(torch.float32)
    if zero is not None:
        weight = weight - zero.to(torch.float32)[:, order]
    return weight * scale.to(torch.float32)[:, order]


def _scaled(module: str, weight: Tensor, scale: Tensor, group: QuantizationGroup) -> Tensor:
    """float8 values times their scales: one, one a row, one a group of columns, or one a block."""
    rows, columns = weight.shape
    scale = scale.to(torch.float32)
    if scale.numel() == 1:
        return weight * scale.reshape(1, 1)
    if scale.dim() == 1:
        scale = scale.unsqueeze(1)
    block = group.block_structure or (1, group.scheme.group_size or columns)
    wanted = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != wanted:
        raise CheckpointError(
            f"{module}.weight_scale has shape {list(scale.shape)}; a weight of {rows} x {columns} with "
            f"{group.scheme.strategy} scales needs {list(wanted)}"
        )
    full = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight * full
