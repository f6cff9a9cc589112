"""compressed-tensors' tensors of a module -> a weight in the in-memory layout, or dense where it has no place there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.checkpoint.codes import by_blocks, column_order, from_packed_codes, from_signed_codes, in_memory, unpacked
from octavo.checkpoint.module_reader import ModuleReader, StoredTensors, module_of
from octavo.checkpoint.packing import packed_columns
from octavo.checkpoint.quantization_config import QuantizationConfig, QuantizationGroup
from octavo.checkpoint.quantized import QuantizedWeight, memory_scheme
from octavo.checkpoint.scheme import WeightScheme
from octavo.checkpoint.small_floats import E2M1, E2M3, decode_nibbles, decode_sixes, power_of_two
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


class CompressedReader(ModuleReader):
    """Decodes the modules of one checkpoint. What is stored decides whether a module is compressed, not `ignore`."""

    def __init__(self, config: QuantizationConfig, source: StoredTensors) -> None:
        super().__init__(source)
        self.config = config

    def dense_name(self, name: str) -> str | None:
        for part in PARTS:
            if name.endswith(f".{part}"):
                return f"{name.removesuffix(part)}weight" if part == "weight_packed" else None
        return name

    def holds(self, name: str) -> bool:
        module = module_of(name)
        return bool(module) and any(
            self._source.has_stored(f"{module}.{part}") for part in ("weight_packed", "weight_scale")
        )

    def stored_bits(self, name: str) -> int | None:
        group = self.config.group_of(module_of(name))
        return None if group is None else group.scheme.num_bits

    def read(self, name: str) -> QuantizedWeight | Tensor:
        """Integers by group, channel or tensor, and E4M3 by channel or tensor, stay quantized; the rest comes dense.

        Static activations bring the one scale of the layer's input. Activations that no kernel rounds stay as they are.
        """
        module = module_of(name)
        group = self.config.group_of(module)
        if group is None:
            raise CheckpointError(
                f"module {module!r} is stored quantized, but no group of quantization_config has a target for it"
            )
        scheme = group.scheme
        weight = self._read(module, group)
        if isinstance(weight, Tensor):
            self.note_dense(f"{scheme.num_bits}-bit {scheme.type} ({group.format}, {scheme.strategy})")
            return weight
        weight.scheme = self._with_served_activations(weight.scheme)
        weight.input_scale = self._input_scale(module, weight.scheme)
        return weight

    def _with_served_activations(self, scheme: WeightScheme) -> WeightScheme:
        given = scheme.activations
        if given is None:
            return scheme
        rounds = (given.num_bits, given.type, given.symmetric) == (8, scheme.type, True)
        if rounds and given.strategy in ("token", "tensor"):
            return scheme
        self.note(
            f"activations of {given.num_bits} bits ({given.type}, {given.strategy}) beside {scheme.num_bits}-bit "
            f"{scheme.type} weights have no kernel and stay in the model's dtype"
        )
        return replace(scheme, activations=None)

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

    def _read(self, module: str, group: QuantizationGroup) -> QuantizedWeight | Tensor:
        if self._source.has_stored(f"{module}.weight_packed"):
            return self._read_packed(module, group)
        weight = self._source.stored(f"{module}.weight")
        if weight.dtype in FLOAT8:
            return self._read_float(module, weight, group)
        if weight.dtype != torch.int8:
            return weight  # fake-quantized: the values are already there
        rows, columns = self._two_dimensions(f"{module}.weight", weight)
        scale = self._scale(module, group.scheme, rows, columns)
        zero = self._zero_point(module, group.scheme, rows, scale.shape[1])
        return from_signed_codes(group.scheme, weight, scale, zero)

    def _read_float(self, module: str, weight: Tensor, group: QuantizationGroup) -> QuantizedWeight | Tensor:
        rows, columns = self._two_dimensions(f"{module}.weight", weight)
        kept = memory_scheme(group.scheme)
        if kept is not None and kept.type == "float" and weight.dtype == torch.float8_e4m3fn:
            scale = self._scale(module, group.scheme, rows, columns)
            return in_memory(kept, (rows, columns), weight, scale, None)
        name = f"{module}.weight_scale"
        scale = self._source.stored(name)
        if scale.dtype == torch.uint8:
            scale = power_of_two(scale)
        if scale.numel() == 1:
            return weight.to(torch.float32) * scale.to(torch.float32).reshape(1, 1)
        block = group.block_structure or (1, group.scheme.group_size or columns)
        return by_blocks(name, weight, scale.unsqueeze(1) if scale.dim() == 1 else scale, block)

    def _read_packed(self, module: str, group: QuantizationGroup) -> QuantizedWeight | Tensor:
        name = f"{module}.weight_packed"
        packed, scheme = self._source.stored(name), group.scheme
        self._two_dimensions(name, packed)
        if scheme.type == "float" and packed.dtype == torch.uint8 and scheme.num_bits in (4, 6):
            return self._read_small_floats(module, packed, scheme)
        if scheme.type != "int" or packed.dtype != torch.int32:
            raise UnsupportedModelError(
                f"{name}: the format {group.format!r} ({scheme.num_bits}-bit {scheme.type} in {packed.dtype}) is not "
                "read; pack-quantized, int-quantized, float-quantized, naive-quantized, nvfp4-pack-quantized, "
                "mxfp4-pack-quantized, mxfp6-pack-quantized and mxfp8-quantized are"
            )
        rows, columns = self._stored_shape(module, packed)
        if packed.shape[1] > packed_columns(columns, 32):
            raise CheckpointError(
                f"{name} has shape {list(packed.shape)}; it does not fit a weight of {rows} x {columns}"
            )
        scale = self._scale(module, scheme, rows, columns)
        zero = self._zero_point(module, scheme, rows, scale.shape[1])
        order_name, order = f"{module}.weight_g_idx", None
        if self._source.has_stored(order_name):
            order = column_order(order_name, self._source.stored(order_name), columns, scale.shape[1])
        return from_packed_codes(name, packed, scheme, (rows, columns), scale, zero, order)

    def _stored_shape(self, module: str, packed: Tensor) -> tuple[int, int]:
        shape = self._source.stored(f"{module}.weight_shape").tolist()
        if not isinstance(shape, list) or len(shape) != 2 or shape[0] != packed.shape[0]:
            raise CheckpointError(
                f"{module}.weight_packed has shape {list(packed.shape)}, but {module}.weight_shape says {shape}"
            )
        return int(shape[0]), int(shape[1])

    def _read_small_floats(self, module: str, packed: Tensor, scheme: WeightScheme) -> Tensor:
        """NVFP4 (E4M3 scales by 16 over one of the tensor), MXFP4 and MXFP6 (powers of two by 32)."""
        values = decode_nibbles(packed, E2M1) if scheme.num_bits == 4 else decode_sixes(packed, E2M3)
        name, overall = f"{module}.weight_scale", f"{module}.weight_global_scale"
        scale = self._source.stored(name)
        scale = power_of_two(scale) if scale.dtype == torch.uint8 else scale.to(torch.float32)
        if self._source.has_stored(overall):
            scale = scale / self._source.stored(overall).to(torch.float32).reshape(-1)[0]
        elif scheme.strategy == "tensor_group":
            raise CheckpointError(f"{overall} is missing; the scales of {module} are shares of it")
        return by_blocks(name, values, scale, (1, scheme.group_size or values.shape[1]))

    @staticmethod
    def _two_dimensions(name: str, weight: Tensor) -> tuple[int, int]:
        if weight.dim() != 2:
            raise CheckpointError(f"{name} has shape {list(weight.shape)}; a quantized weight has two dimensions")
        return weight.shape[0], weight.shape[1]

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
            return unpacked(name, zero.T.contiguous(), scheme.num_bits, rows).T
        if zero.numel() == 1:
            return zero.reshape(1, 1).expand(rows, groups)
        if zero.numel() != rows * groups:
            raise CheckpointError(f"{name} has shape {list(zero.shape)}; it must be [{rows}, {groups}]")
        return zero.reshape(rows, groups)
