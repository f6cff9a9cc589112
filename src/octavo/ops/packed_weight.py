"""Weights in the order that a product kernel reads, and the choice of that order.

`LAYOUTS` is the ordered list of candidates of the operation `linear`; the last are plain torch and take everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import UserError
from octavo.ops import reference


class ActivationSchemeLike(Protocol):
    """How the input of a layer is quantized; see `octavo.checkpoint.scheme.ActivationScheme`."""

    @property
    def num_bits(self) -> int: ...
    @property
    def type(self) -> str: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def strategy(self) -> str: ...


class WeightSchemeLike(Protocol):
    """How a weight is quantized; see `octavo.checkpoint.scheme.WeightScheme`."""

    @property
    def num_bits(self) -> int: ...
    @property
    def type(self) -> str: ...
    @property
    def activations(self) -> ActivationSchemeLike | None: ...


class QuantizedWeightLike(Protocol):
    """W[n, k] = scale[n, g] * codes[n, k] + offset[n, g]; see `octavo.checkpoint.quantized.QuantizedWeight`.

    codes: 4-bit uint8 [N, K / 2] with the even k in the low half, values 0..15; 8-bit int8 [N, K], signed, or for the
    type "float" float8_e4m3fn [N, K].
    scale, offset: [N, G], g = k // (K / G); offset may be None for 8-bit codes.
    order: int64 [K], the input that each column is for, or None where they are in order.
    """

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def codes(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor: ...
    @property
    def offset(self) -> Tensor | None: ...
    @property
    def scheme(self) -> WeightSchemeLike: ...
    @property
    def order(self) -> Tensor | None: ...
    @property
    def input_scale(self) -> float | None: ...


class PackedWeight(ABC):
    """A weight [N, K] that `octavo.ops.linear` multiplies with; made by `octavo.ops.pack_weight`."""

    name: str = ""
    shape: tuple[int, int]
    input_kind: str | None = None
    """"int8" or "fp8" where the product takes rows that `reference.quantize_rows` rounds to that, else None."""
    input_scale: float | None = None
    """The static scale of those rows, or None where each row has its own."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory that the packed weight occupies, with scales."""

    @property
    def dense_copy_bytes(self) -> int:
        """What a copy without codes would add to that, where products of many rows are faster with one; else 0."""
        return 0

    def keep_dense_copy(self) -> None:  # noqa: B027 - a layout without a use for it has nothing to do
        """Make that copy, for products of many rows from now on."""

    @abstractmethod
    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """x [T, K] times the transposed weight, plus bias [N]: [T, N]."""

    def linear_quantized(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`linear` for rows that are quantized already to `input_kind`: codes [T, K] and float32 scale [T, 1].

        `residual` [T, N] is added to the rounded product, and the sum is written back to it and returned.
        """
        raise NotImplementedError(f"{self.name} takes no quantized rows")

    @abstractmethod
    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight [*ids.shape, K], dequantized: the embedding lookup of a tied output layer."""

    def describe(self) -> str:
        """One line for logs and reports: kind, shape and size."""
        return f"{self.name} [{self.shape[0]}, {self.shape[1]}], {self.num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Layout:
    """A way to pack weights: `rejects(weight, dtype, device)` says why it does not take one, or None."""

    name: str
    rejects: Callable[[Tensor | QuantizedWeightLike, torch.dtype, torch.device], str | None]
    pack: Callable[[Tensor | QuantizedWeightLike, torch.dtype, torch.device], PackedWeight]
    note: str = ""


class TorchDense(PackedWeight):
    """The weight as it is, multiplied by torch."""

    name = "torch dense"

    @staticmethod
    def rejects(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> str | None:
        return None if isinstance(weight, Tensor) else "serves weights that are not quantized"

    def __init__(self, weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> None:
        assert isinstance(weight, Tensor)
        self.weight = weight.to(device=device, dtype=dtype).contiguous()
        self.shape = (weight.shape[0], weight.shape[1])

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        return self._product(x, self.weight, bias).to(out_dtype)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight[ids].to(dtype)


class TorchQuantized(PackedWeight):
    """Codes, scales and offsets as they are; each product dequantizes the whole weight. It defines the result."""

    name = "torch dequantize"

    @staticmethod
    def rejects(weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> str | None:
        return "serves quantized weights" if isinstance(weight, Tensor) else None

    def __init__(self, weight: Tensor | QuantizedWeightLike, dtype: torch.dtype, device: torch.device) -> None:
        assert not isinstance(weight, Tensor)
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))
        self.num_bits = weight.scheme.num_bits
        self.input_kind = input_kind(weight.scheme)
        self.input_scale = weight.input_scale
        self.dtype = dtype
        self.codes = weight.codes.to(device).contiguous()
        self.scale = weight.scale.to(device)
        self.offset = None if weight.offset is None else weight.offset.to(device)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (0 if self.offset is None else self.offset.nbytes)

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if self.input_kind is not None:
            codes, scale = reference.quantize_rows(x, self.input_kind, self.input_scale)
            return self.linear_quantized(codes, scale, bias, out_dtype)
        return self._product(x, self.rows(slice(None), x.dtype), bias).to(out_dtype)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def linear_quantized(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        residual: Tensor | None = None,
    ) -> Tensor:
        y = self._product(codes.float(), self.rows(slice(None), torch.float32), None) * scale
        y = (y if bias is None else y + bias).to(out_dtype)
        return y if residual is None else residual.add_(y)

    def rows(self, ids: Tensor | slice, dtype: torch.dtype) -> Tensor:
        offset = None if self.offset is None else self.offset[ids]
        return dequantize(self.codes[ids], self.num_bits, self.scale[ids], offset).to(dtype)


def dequantize(codes: Tensor, num_bits: int, scale: Tensor, offset: Tensor | None) -> Tensor:
    """Float32 weights [..., K] from codes [..., K * num_bits / 8] and scale, offset [..., G]."""
    if num_bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    weight = codes.float().unflatten(-1, (scale.shape[-1], -1)) * scale.float()[..., None]
    if offset is not None:
        weight += offset.float()[..., None]
    return weight.flatten(-2)


def input_kind(scheme: WeightSchemeLike) -> str | None:
    """What the layer's input is rounded to: "int8", "fp8" or None. UserError for a scheme that no layout serves."""
    if (scheme.type, scheme.num_bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise UserError(
            f"weights of type {scheme.type} with {scheme.num_bits} bits have no kernel; int with 4 or 8 bits and float "
            "with 8 bits do: dequantize the weight first"
        )
    activations = scheme.activations
    if activations is None:
        return None
    kind = (activations.num_bits, activations.type, activations.symmetric)
    if kind != (8, scheme.type, True) or activations.strategy not in ("token", "tensor"):
        raise UserError(
            f"activations with (bits, type, symmetric) = {kind} by {activations.strategy} have no kernel for "
            f"{scheme.type} weights; (8, {scheme.type!r}, True) by token or tensor do: compress with the scheme W8A8 "
            "or a weight-only scheme"
        )
    return "int8" if scheme.type == "int" else "fp8"


def quantizes_input(scheme: WeightSchemeLike) -> bool:
    """Whether the layer's input is rounded too. Raises UserError for a scheme that no layout serves."""
    return input_kind(scheme) is not None
