"""The one in-memory layout of a quantized weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.checkpoint.scheme import WeightScheme
from octavo.errors import CheckpointError

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Unsigned 4-bit codes, one a byte [N, K] -> uint8 [N, K/2], the even element in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> uint8 [..., K] of unsigned 4-bit codes; the inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def memory_scheme(scheme: WeightScheme) -> WeightScheme | None:
    """The scheme under which such a weight is kept quantized in memory; None where it is kept dense.

    A single scale becomes one a row. 1 to 3 bits are kept as 4, and 5 to 7 as 8: the values are the same.
    """
    strategy = "channel" if scheme.strategy == "tensor" else scheme.strategy
    if strategy not in ("group", "channel"):
        return None
    if scheme.type == "int":
        return replace(scheme, strategy=strategy, num_bits=4 if scheme.num_bits <= 4 else 8)
    kept = scheme.num_bits == 8 and scheme.symmetric and strategy == "channel"
    return replace(scheme, strategy=strategy) if kept else None


def code_dtype(scheme: WeightScheme) -> torch.dtype:
    """The dtype of `QuantizedWeight.codes`."""
    if scheme.type == "float":
        return torch.float8_e4m3fn
    return torch.uint8 if scheme.num_bits == 4 else torch.int8


@dataclass
class QuantizedWeight:
    """W[n, k] = scale[n, g] * q[n, k] + offset[n, g], with g = k // group_size (one group for a channel).

    `codes` holds 4-bit q as uint8 [N, K/2], the even k in the low nibble, unsigned 0..15, 8-bit integers as int8
    [N, K], signed, and 8-bit floats, which have one scale a row, as float8_e4m3fn [N, K]. `scale` is float [N, G].
    `offset` has scale's shape and dtype and is None only for 8-bit symmetric weights: a 4-bit symmetric weight has
    -8 * scale, a zero point z gives -z * scale (z in the codes' own range), GGUF's Q4_1 its block minimum. Whatever
    does not fit that is refused with CheckpointError.
    """

    scheme: WeightScheme
    shape: tuple[int, int]
    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None
    input_scale: float | None = None
    """The one scale of the layer's input where the checkpoint fixes it (static activations); None: a scale a token."""
    order: Tensor | None = None
    """int64 [K] where columns are kept in another order than the inputs: column k of the codes, in group k //
    group_size, is that of input order[k]."""

    def __post_init__(self) -> None:
        rows, columns = self.shape
        bits = self.scheme.num_bits
        if memory_scheme(self.scheme) != self.scheme:
            raise CheckpointError(
                "a quantized weight in memory has 4 or 8 integer bits by group or channel, "
                f"or 8 bits of symmetric float by channel, not {self.scheme}"
            )
        packed = (rows, columns // 2) if bits == 4 else (rows, columns)
        if bits == 4 and columns % 2:
            raise CheckpointError(f"4-bit weight of shape {self.shape}: the number of inputs must be even")
        self._check("codes", self.codes, packed, (code_dtype(self.scheme),))
        groups = (rows, self.scheme.num_groups(columns))
        self._check("scale", self.scale, groups, SCALE_DTYPES)
        if self.offset is not None:
            self._check("offset", self.offset, groups, (self.scale.dtype,))
        elif bits == 4 or not self.scheme.symmetric:
            raise CheckpointError(f"an offset is needed for {self.scheme}")
        if self.order is not None:
            self._check("order", self.order, (columns,), (torch.int64,))

    def _check(self, what: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            raise CheckpointError(
                f"quantized weight of shape {self.shape}: {what} is {tensor.dtype} {tuple(tensor.shape)}; "
                f"it must be {' or '.join(map(str, dtypes))} {shape}"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales, offsets and order together."""
        parts = (self.codes, self.scale, self.offset, self.order)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @property
    def group_size(self) -> int:
        """Input elements that share a scale; all K of them for a channel."""
        return self.scheme.group_size or self.shape[1]

    def unpacked_codes(self) -> Tensor:
        """[N, K]: uint8 0..15 for 4 bits, int8 or float8_e4m3fn for 8 bits."""
        return unpack_nibbles(self.codes) if self.scheme.num_bits == 4 else self.codes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K]; computed in float32, then rounded once to `dtype`."""
        return self._in_place(_dequantize(self.unpacked_codes(), self.scale, self.offset, dtype))

    def rows(self, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantized rows: index of any shape [...] -> [..., K] (the embedding lookup)."""
        flat = index.reshape(-1)
        codes = self.codes[flat]
        if self.scheme.num_bits == 4:
            codes = unpack_nibbles(codes)
        offset = None if self.offset is None else self.offset[flat]
        rows = self._in_place(_dequantize(codes, self.scale[flat], offset, dtype))
        return rows.reshape(*index.shape, self.shape[1])

    def _in_place(self, weight: Tensor) -> Tensor:
        """Columns [R, K] of codes as columns of inputs."""
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def select_rows(self, index: Tensor) -> QuantizedWeight:
        """The same weight with rows taken in the order of `index` [M]."""
        offset = None if self.offset is None else self.offset[index]
        shape = (index.numel(), self.shape[1])
        return replace(self, shape=shape, codes=self.codes[index], scale=self.scale[index], offset=offset)

    @staticmethod
    def concat(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Stack weights along N, for fused projections. Scheme, K, order and the dtype of the scales must be the same.

        Static scales of the input they share become the largest of them, as vLLM has it.
        """
        first = parts[0]
        for part in parts[1:]:
            same = part.scheme == first.scheme and part.shape[1] == first.shape[1] and same_order(part, first)
            if not same or part.scale.dtype != first.scale.dtype or (part.offset is None) != (first.offset is None):
                raise CheckpointError(
                    f"fused projections must be quantized alike: {first.scheme} {first.shape} {first.scale.dtype} "
                    f"is not {part.scheme} {part.shape} {part.scale.dtype}"
                )
        inputs = [part.input_scale for part in parts if part.input_scale is not None]
        if inputs and len(inputs) != len(parts):
            raise CheckpointError("fused projections must all have a static input scale, or none of them")
        offsets = [part.offset for part in parts if part.offset is not None]
        return QuantizedWeight(
            first.scheme,
            (sum(part.shape[0] for part in parts), first.shape[1]),
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat(offsets) if offsets else None,
            max(inputs, default=None),
            first.order,
        )


def same_order(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether two weights have their columns in the same order."""
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _dequantize(codes: Tensor, scale: Tensor, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows, columns = codes.shape
    groups = scale.shape[1]
    weight = codes.to(torch.float32).reshape(rows, groups, columns // max(groups, 1))
    weight *= scale.to(torch.float32).unsqueeze(-1)
    if offset is not None:
        weight += offset.to(torch.float32).unsqueeze(-1)
    return weight.reshape(rows, columns).to(dtype)
