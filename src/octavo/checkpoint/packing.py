"""compressed-tensors' packing: integer codes as a little-endian bit stream in int32 words.

The rule: u = q + 2^(bits - 1); element i of a row occupies bits [i * bits, (i + 1) * bits) of the row's stream, the
lowest bit first, across word borders where bits does not divide 32; the last word is filled with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import CheckpointError

ROWS_AT_ONCE = 4096  # bounds the memory of the bit-by-bit way, 8 bytes a bit


def packed_columns(columns: int, bits: int) -> int:
    """int32 words that a row of `columns` codes needs."""
    return -(-columns * bits // 32)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Signed codes [N, K] in -2^(bits-1) .. 2^(bits-1)-1 -> int32 [N, ceil(K * bits / 32)] ("weight_packed")."""
    if not 1 <= bits <= 8 or codes.dim() != 2:
        raise CheckpointError(f"codes are packed with 1 to 8 bits and two dimensions, not {bits} and {codes.dim()}")
    rows, columns = codes.shape
    half = 1 << (bits - 1)
    if codes.numel() and (int(codes.min()) < -half or int(codes.max()) >= half):
        raise CheckpointError(
            f"codes reach from {int(codes.min())} to {int(codes.max())}; {bits} bits hold {-half} to {half - 1}"
        )
    unsigned = (codes.to(torch.int16) + half).to(torch.uint8)
    if bits in (4, 8):
        return _pack_bytes(unsigned, bits, packed_columns(columns, bits))
    parts = [_pack_bits(part, bits, packed_columns(columns, bits)) for part in unsigned.split(ROWS_AT_ONCE)]
    return torch.cat(parts) if parts else codes.new_empty(rows, packed_columns(columns, bits), dtype=torch.int32)


def unpack_codes(packed: Tensor, bits: int, columns: int) -> Tensor:
    """int32 [N, W] -> signed int8 [N, columns]; also the layout before compressed-tensors 0.17, without straddling."""
    if packed.dtype != torch.int32:
        raise CheckpointError(f"packed codes are {packed.dtype}, not int32")
    words = packed.shape[1]
    half = 1 << (bits - 1)
    legacy = -(-columns // (32 // bits))
    if words not in (packed_columns(columns, bits), legacy):
        raise CheckpointError(
            f"packed codes have {words} words a row; {columns} codes of {bits} bits need "
            f"{packed_columns(columns, bits)}"
        )
    if bits == 8:
        unsigned = row_bytes(packed)
    elif bits == 4:
        octets = row_bytes(packed)
        unsigned = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
    else:
        step = bits if words == packed_columns(columns, bits) else None
        parts = [_unpack_bits(part, bits, step) for part in packed.split(ROWS_AT_ONCE)]
        unsigned = torch.cat(parts)
    return (unsigned[:, :columns].to(torch.int16) - half).to(torch.int8)


def packed_to_memory(packed: Tensor, bits: int, columns: int) -> Tensor:
    """4- or 8-bit int32 [N, W] -> the codes of a QuantizedWeight: the same bytes, but for the sign of 8 bits."""
    octets = row_bytes(packed)[:, : columns * bits // 8]
    return octets.contiguous() if bits == 4 else (octets ^ 128).view(torch.int8)


def row_bytes(packed: Tensor) -> Tensor:
    """int32 [N, W] -> uint8 [N, 4 W]. A single column counts as contiguous whatever its stride, hence the detour."""
    return packed.reshape(-1).contiguous().view(torch.uint8).view(packed.shape[0], 4 * packed.shape[1])


def _pack_bytes(unsigned: Tensor, bits: int, words: int) -> Tensor:
    rows, columns = unsigned.shape
    full = unsigned.new_zeros(rows, words * 32 // bits)
    full[:, :columns] = unsigned
    octets = full if bits == 8 else full[:, 0::2] | (full[:, 1::2] << 4)
    return octets.contiguous().view(torch.int32)


def _pack_bits(unsigned: Tensor, bits: int, words: int) -> Tensor:
    rows, columns = unsigned.shape
    stream = torch.zeros(rows, words * 32, dtype=torch.int64, device=unsigned.device)
    positions = torch.arange(bits, device=unsigned.device)
    stream[:, : columns * bits] = ((unsigned.unsqueeze(-1).to(torch.int64) >> positions) & 1).flatten(1)
    values = (stream.view(rows, words, 32) << torch.arange(32, device=unsigned.device)).sum(-1)
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)


def _unpack_bits(packed: Tensor, bits: int, step: int | None) -> Tensor:
    """`step` is None for the old layout, in which a word holds 32 // bits whole codes and leaves the rest empty."""
    rows = packed.shape[0]
    stream = (packed.unsqueeze(-1).to(torch.int64) >> torch.arange(32, device=packed.device)) & 1
    stream = stream.flatten(1) if step else stream[:, :, : 32 // bits * bits].flatten(1)
    usable = stream.shape[1] // bits * bits
    codes = stream[:, :usable].view(rows, usable // bits, bits) << torch.arange(bits, device=packed.device)
    return codes.sum(-1).to(torch.uint8)
