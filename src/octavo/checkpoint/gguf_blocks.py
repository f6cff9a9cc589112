"""GGUF's blocks -> the one in-memory layout. Block formats: ggml-common.h of llama.cpp."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import WeightScheme

GROUP = 32
SUPER_BLOCK = 256
SYMMETRIC = ("Q4_0", "Q5_0", "Q8_0")
QUANTIZED_TYPES = (*SYMMETRIC, "Q4_1", "Q5_1", "Q4_K", "Q5_K")
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Bytes = npt.NDArray[np.uint8]
Parts = tuple[npt.NDArray[Any], Tensor, Tensor | None]  # codes, scale, offset


def code_bits(type_name: str) -> int | None:
    """Bits of a code, which the type is named by (Q6_K, IQ4_XS, MXFP4); None for a plain type."""
    named = re.match(r"(?:[IT]?Q|MXFP|NVFP)(\d)", type_name)
    return None if named is None else int(named[1])


def scheme_of(type_name: str) -> WeightScheme:
    """Groups of 32, of 4 bits where the type has 4, else of 8: codes of 5 bits have no kernel of their own."""
    bits = 4 if type_name.startswith("Q4") else 8
    return WeightScheme(bits, symmetric=type_name in SYMMETRIC, strategy="group", group_size=GROUP)


def repack(raw: Bytes, type_name: str, shape: tuple[int, int]) -> QuantizedWeight:
    """Bytes of a tensor [N, K] of one of QUANTIZED_TYPES -> QuantizedWeight, exactly.

    Scales stay float16; those of Q4_K and Q5_K are products of a float16 and 6 bits, hence float32.
    """
    rows, columns = shape
    if type_name.endswith("_K"):
        parts: Parts = _super_blocks(raw.reshape(rows, columns // SUPER_BLOCK, -1), type_name)
    else:
        parts = _blocks(raw.reshape(rows, columns // GROUP, -1), type_name)
    codes, scale, offset = parts
    scheme = scheme_of(type_name)
    width = columns // 2 if scheme.num_bits == 4 else columns
    stored = torch.from_numpy(codes.reshape(rows, width))
    return QuantizedWeight(scheme, shape, stored, scale.reshape(rows, -1), offset)


def _blocks(blocks: Bytes, type_name: str) -> Parts:
    """Blocks [N, G, bytes] of 32 elements -> codes, scale [N, G] and offset."""
    scale = _halves(blocks[:, :, 0:2])
    if type_name == "Q8_0":
        return np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8), scale, None
    has_minimum = type_name.endswith("_1")
    rest = blocks[:, :, 4:] if has_minimum else blocks[:, :, 2:]
    offset = _halves(blocks[:, :, 2:4]) if has_minimum else None
    if type_name.startswith("Q4"):
        return _neighbours_together(rest), scale, scale * -8 if offset is None else offset
    low, high = rest[:, :, 4:], np.unpackbits(rest[:, :, :4], axis=2, bitorder="little")
    codes = np.concatenate((low & 15, low >> 4), axis=2) | (high << 4)
    return codes.view(np.int8) if has_minimum else codes.view(np.int8) - np.int8(16), scale, offset


def _super_blocks(blocks: Bytes, type_name: str) -> Parts:
    """Blocks [N, S, bytes] of 256 elements: two float16, then 6-bit scales and minima of 8 groups, then the codes."""
    scales, minima = _six_bits(blocks[:, :, 4:16])
    scale = _halves(blocks[:, :, 0:2]).float().unsqueeze(2) * torch.from_numpy(scales).float()
    offset = -_halves(blocks[:, :, 2:4]).float().unsqueeze(2) * torch.from_numpy(minima).float()
    nibbles = blocks[:, :, -128:].reshape(*blocks.shape[:2], 4, 32)
    if type_name == "Q4_K":
        codes = np.stack((_pairs(nibbles & 15), _pairs(nibbles >> 4)), axis=3)
    else:
        # Bit 2 c of byte i is the fifth of element i of 64 c, bit 2 c + 1 that of element 32 + i.
        high = (blocks[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
        codes = np.stack((nibbles & 15, nibbles >> 4), axis=3).reshape(high.shape) | (high << 4)
        codes = codes.view(np.int8)
    return codes, scale, offset.flatten(1)


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes [N, S, 12] -> 8 scales and 8 minima: four whole ones of each, the others in what is left over."""
    first, second, third = packed[:, :, 0:4], packed[:, :, 4:8], packed[:, :, 8:12]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=2)
    return scales, np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=2)


def _pairs(codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Two neighbouring 4-bit codes in a byte, the even one in the low half."""
    pairs: npt.NDArray[Any] = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return pairs


def _halves(blocks: Bytes) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(blocks).view(np.float16)[:, :, 0])


def _neighbours_together(nibbles: Bytes) -> Bytes:
    """[N, G, 16] with elements i and i + 16 in byte i -> [N, G, 16] with elements 2i and 2i + 1 in byte i."""
    # Two bytes at once: of the word's nibbles 3 2 1 0, elements i and i + 1 are 0 and 2, i + 16 and i + 17 are 1 and 3.
    words = np.ascontiguousarray(nibbles).view("<u2")
    out = np.empty(nibbles.shape, dtype=np.uint8)
    out[:, :, :8] = (words & 0x000F) | ((words >> 4) & 0x00F0)
    out[:, :, 8:] = ((words >> 4) & 0x000F) | ((words >> 8) & 0x00F0)
    return out


def dequantize_any(raw: Bytes, type_number: int, shape: tuple[int, ...]) -> Tensor:
    """Any type that the gguf package can dequantize, as float32. NotImplementedError for the others."""
    import gguf

    kind = gguf.GGMLQuantizationType(type_number)
    rows = raw.reshape(*shape[:-1], -1)
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(rows, kind), dtype=np.float32)).reshape(shape)
