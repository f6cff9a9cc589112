"""GGUF's blocks of 32 -> the one in-memory layout. Block formats: ggml-common.h of llama.cpp."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import WeightScheme

GROUP = 32
Q4_SCHEMES = {
    "Q4_0": WeightScheme(4, symmetric=True, strategy="group", group_size=GROUP),
    "Q4_1": WeightScheme(4, symmetric=False, strategy="group", group_size=GROUP),
}
Q8_SCHEME = WeightScheme(8, symmetric=True, strategy="group", group_size=GROUP)
QUANTIZED_TYPES = ("Q4_0", "Q4_1", "Q8_0")
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def repack(raw: npt.NDArray[np.uint8], type_name: str, shape: tuple[int, int]) -> QuantizedWeight:
    """Bytes of a Q4_0, Q4_1 or Q8_0 tensor [N, K] -> QuantizedWeight; exact (scales stay float16)."""
    rows, columns = shape
    blocks = raw.reshape(rows, columns // GROUP, -1)
    scale = _halves(blocks[:, :, 0:2])
    if type_name == "Q8_0":
        signed = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(rows, columns)
        return QuantizedWeight(Q8_SCHEME, shape, torch.from_numpy(signed), scale)
    has_minimum = type_name == "Q4_1"
    codes = _neighbours_together(blocks[:, :, 4:] if has_minimum else blocks[:, :, 2:])
    offset = _halves(blocks[:, :, 2:4]) if has_minimum else scale * -8
    return QuantizedWeight(
        Q4_SCHEMES[type_name], shape, torch.from_numpy(codes.reshape(rows, columns // 2)), scale, offset
    )


def _halves(blocks: npt.NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(blocks).view(np.float16)[:, :, 0])


def _neighbours_together(nibbles: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[N, G, 16] with elements i and i + 16 in byte i -> [N, G, 16] with elements 2i and 2i + 1 in byte i."""
    # Two bytes at once: of the word's nibbles 3 2 1 0, elements i and i + 1 are 0 and 2, i + 16 and i + 17 are 1 and 3.
    words = np.ascontiguousarray(nibbles).view("<u2")
    out = np.empty(nibbles.shape, dtype=np.uint8)
    out[:, :, :8] = (words & 0x000F) | ((words >> 4) & 0x00F0)
    out[:, :, 8:] = ((words >> 4) & 0x000F) | ((words >> 8) & 0x00F0)
    return out


def dequantize_any(raw: npt.NDArray[np.uint8], type_number: int, shape: tuple[int, ...]) -> Tensor:
    """Any type that the gguf package can dequantize, as float32. NotImplementedError for the others."""
    import gguf

    kind = gguf.GGMLQuantizationType(type_number)
    rows = raw.reshape(*shape[:-1], -1)
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(rows, kind), dtype=np.float32)).reshape(shape)
