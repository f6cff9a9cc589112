"""FP8 checkpoints whose method is called "fp8": DeepSeek's blocks with weight_scale_inv, AutoFP8's single scales."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.checkpoint.codes import by_blocks, in_memory
from octavo.checkpoint.config_fields import Fields
from octavo.checkpoint.module_reader import ModuleReader, StoredTensors
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.errors import CheckpointError, UnsupportedModelError

SCALES = ("_scale_inv", "_scale")  # both multiply; "inv" is of the scale that the weight was multiplied with
INPUT_SCALES = ("input_scale", "activation_scale")
ACTIVATIONS = ("dynamic", "static")


class FP8Reader(ModuleReader):
    """E4M3 weights with a scale a tensor or a row stay quantized; those with a scale a block come dense."""

    def __init__(self, fields: Fields, source: StoredTensors) -> None:
        super().__init__(source)
        self._block = fields.pair("weight_block_size")
        self._static = fields.text("activation_scheme", "dynamic") == "static"
        if (given := fields.text("activation_scheme", "dynamic")) not in ACTIVATIONS:
            raise fields.wrong("activation_scheme", f"one of {ACTIVATIONS}, not {given!r}")
        if (kind := fields.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
            raise UnsupportedModelError(f"{fields.path}: FP8 weights of the kind {kind!r} are not read; e4m3 is")

    def dense_name(self, name: str) -> str | None:
        for suffix in SCALES:
            if name.endswith(suffix) and self._source.has_stored(name.removesuffix(suffix)):
                return None
        module, _, part = name.rpartition(".")
        return None if part in INPUT_SCALES and self._source.has_stored(f"{module}.weight") else name

    def holds(self, name: str) -> bool:
        return self._source.has_stored(name) and any(self._source.has_stored(f"{name}{suffix}") for suffix in SCALES)

    def stored_bits(self, name: str) -> int:
        return 8

    def read(self, name: str) -> QuantizedWeight | Tensor:
        weight = self._source.stored(name)
        scale_name = next(f"{name}{suffix}" for suffix in SCALES if self._source.has_stored(f"{name}{suffix}"))
        scale = self._source.stored(scale_name).to(torch.float32)
        if weight.dtype != torch.float8_e4m3fn:
            raise UnsupportedModelError(f"{name} is {weight.dtype}; a checkpoint of the method fp8 has float8_e4m3fn")
        if weight.dim() == 2 and scale.numel() in (1, weight.shape[0]) and (scale.numel() == 1 or self._block is None):
            return self._by_row(name, weight, scale)
        if self._block is None:
            raise CheckpointError(
                f"{scale_name} has shape {list(scale.shape)}; without weight_block_size, {name} {list(weight.shape)} "
                "needs one scale, or one a row"
            )
        self.note_dense(f"FP8 (a scale a block of {self._block[0]} x {self._block[1]})")
        return by_blocks(scale_name, weight, scale, self._block)

    def _by_row(self, name: str, weight: Tensor, scale: Tensor) -> QuantizedWeight:
        rows = weight.shape[0]
        input_scale = self._input_scale(name) if self._static else None
        tokens = ActivationScheme(
            type="float", strategy="tensor" if self._static else "token", dynamic=not self._static
        )
        scheme = WeightScheme(8, "float", strategy="channel", activations=tokens)
        found = in_memory(
            scheme, (rows, weight.shape[1]), weight, scale.reshape(-1, 1).expand(rows, 1).contiguous(), None
        )
        found.input_scale = input_scale
        return found

    def _input_scale(self, name: str) -> float:
        module = name.rpartition(".")[0]
        stored = [f"{module}.{part}" for part in INPUT_SCALES if self._source.has_stored(f"{module}.{part}")]
        if not stored:
            raise CheckpointError(f"{name}: its activations are static, but {module}.{INPUT_SCALES[0]} is not stored")
        scale = self._source.stored(stored[0])
        if scale.numel() != 1 or not 0 < float(scale) < float("inf"):
            raise CheckpointError(f"{stored[0]} must be one positive number; it has shape {list(scale.shape)}")
        return float(scale)
