"""Integer codes with scales and zero points, as most formats have them -> the one in-memory layout."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.checkpoint.packing import packed_columns, packed_to_memory, unpack_codes
from octavo.checkpoint.quantized import QuantizedWeight, memory_scheme, pack_nibbles
from octavo.checkpoint.scheme import WeightScheme
from octavo.errors import CheckpointError


def from_signed_codes(
    scheme: WeightScheme, codes: Tensor, scale: Tensor, zero: Tensor | None = None
) -> QuantizedWeight | Tensor:
    """Signed codes int8 [N, K], scale [N, G] and zero point [N, G] (signed like the codes) -> the in-memory layout.

    W = scale * (code - zero). Codes of up to 3 bits are kept as 4-bit ones and those of 5 to 7 as 8-bit ones, with the
    same scales and values. An odd K with 4 bits gives the dense weight in float32.
    """
    rows, columns = codes.shape
    kept = memory_scheme(scheme)
    if kept is None or (kept.num_bits == 4 and columns % 2):
        return gathered(codes, scale, zero, even_groups(columns, scale.shape[1]))
    stored = pack_nibbles((codes + 8).to(torch.uint8)) if kept.num_bits == 4 else codes.contiguous()
    return in_memory(kept, (rows, columns), stored, scale, zero)


def from_packed_codes(
    name: str,
    packed: Tensor,
    scheme: WeightScheme,
    shape: tuple[int, int],
    scale: Tensor,
    zero: Tensor | None,
    order: Tensor | None,
) -> QuantizedWeight | Tensor:
    """Packed rows int32 [N, W], named `name` in errors; `order` [K] is the group of each column, if they do
    not follow each other."""
    bits, columns = scheme.num_bits, shape[1]
    if order is not None:
        return _reordered(scheme, unpacked(name, packed, bits, columns), scale, zero, order)
    kept = memory_scheme(scheme)
    whole = packed.shape == (shape[0], packed_columns(columns, bits)) and columns * bits % 8 == 0
    if kept is not None and kept.num_bits == bits and whole:
        return in_memory(kept, shape, packed_to_memory(packed, bits, columns), scale, zero)
    return from_signed_codes(scheme, unpacked(name, packed, bits, columns), scale, zero)


def _reordered(
    scheme: WeightScheme, codes: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor
) -> QuantizedWeight | Tensor:
    """Codes whose columns belong to the groups `order` [K]: groups are brought together where all have one size."""
    sizes = torch.bincount(order, minlength=scale.shape[1])
    if not bool((sizes == sizes[0]).all()):
        return gathered(codes, scale, zero, order)
    columns = torch.argsort(order, stable=True)
    found = from_signed_codes(scheme, codes[:, columns].contiguous(), scale, zero)
    return gathered(codes, scale, zero, order) if isinstance(found, Tensor) else replace(found, order=columns)


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


def unpacked(name: str, packed: Tensor, bits: int, columns: int) -> Tensor:
    """`unpack_codes`, with the tensor's name in its error."""
    try:
        return unpack_codes(packed, bits, columns)
    except CheckpointError as error:
        raise CheckpointError(f"{name} of shape {list(packed.shape)} does not fit: {error}") from error


def even_groups(columns: int, groups: int) -> Tensor:
    """[K]: the group of each column where groups follow each other."""
    return torch.arange(columns) // max(columns // max(groups, 1), 1)


def column_order(name: str, order: Tensor, columns: int, groups: int) -> Tensor | None:
    """The group of each column [K] where an activation order was kept; None when they follow each other."""
    order = order.to(torch.int64)
    if tuple(order.shape) != (columns,) or int(order.min()) < 0 or int(order.max()) >= groups:
        raise CheckpointError(f"{name} {list(order.shape)} must give each of {columns} columns one of {groups} groups")
    return None if torch.equal(order, even_groups(columns, groups)) else order


def gathered(codes: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor) -> Tensor:
    """Dense float32 weight with column k in group order[k]."""
    weight = codes.to(torch.float32)
    if zero is not None:
        weight = weight - zero.to(torch.float32)[:, order]
    return weight * scale.to(torch.float32)[:, order]


def by_blocks(name: str, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32: weight [..., N, K] times the scales [..., ceil(N / rows), ceil(K / columns)] of its blocks."""
    rows, columns = weight.shape[-2:]
    scale = scale.to(torch.float32)
    wanted = (*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != wanted:
        raise CheckpointError(
            f"{name} has shape {list(scale.shape)}; a weight of {rows} x {columns} in blocks of "
            f"{block[0]} x {block[1]} needs {list(wanted)}"
        )
    full = scale.repeat_interleave(block[0], -2)[..., :rows, :]
    return weight.to(torch.float32) * full.repeat_interleave(block[1], -1)[..., :columns]
