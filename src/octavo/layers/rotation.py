"""Orthogonal changes of basis that are applied to rows: Hadamard transforms by their factors, and dense matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FACTOR = 64  # a larger power of two is applied by factors of at most this, each as one matrix product
_CHUNK = 1 << 24  # elements that are rotated at once, which bounds the float64 copy


@dataclass(frozen=True)
class Rotation:
    """R = diag(signs) (I x F_1 x ... x F_n) for Kronecker products x: rows [..., size] become `rows R`.

    `factors` are orthogonal float64 matrices whose orders multiply to the block size, which divides `size`; the
    identity in front makes R block diagonal where the block is smaller. `signs` is [size] of +1 and -1, or None.
    """

    size: int
    factors: tuple[Tensor, ...]
    signs: Tensor | None = None

    @property
    def block(self) -> int:
        """Neighbouring elements that are mixed with each other."""
        return math.prod(len(factor) for factor in self.factors)

    def apply(self, rows: Tensor) -> Tensor:
        """[..., size] -> rows R, computed in the dtype of `rows`."""
        if self.signs is not None:
            rows = rows * self.signs.to(rows)
        return self._factors(rows, self.factors)

    def invert(self, rows: Tensor) -> Tensor:
        """[..., size] -> rows R', which undoes `apply`."""
        rows = self._factors(rows, [factor.t() for factor in self.factors])
        return rows if self.signs is None else rows * self.signs.to(rows)

    def _factors(self, rows: Tensor, factors: Sequence[Tensor]) -> Tensor:
        shape, rest = rows.shape, self.block
        for factor in factors:
            order = len(factor)
            rest //= order
            factor = factor.to(rows)
            if rest == 1:
                rows = rows.reshape(-1, order) @ factor
            else:
                rows = factor.t() @ rows.reshape(-1, order, rest)
        return rows.reshape(shape)

    def matrix(self) -> Tensor:
        """R itself, float64 [size, size]."""
        device = self.factors[0].device if self.factors else None
        return self.apply(torch.eye(self.size, dtype=torch.float64, device=device))


def sylvester(order: int) -> tuple[Tensor, ...]:
    """The factors of Sylvester's Hadamard matrix of an order that is a power of two, scaled to be orthogonal."""
    factors = []
    while order > 1:
        size = min(order, _FACTOR)
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        factors.append(matrix / size**0.5)
        order //= size
    return tuple(factors)


def power_of_two_part(number: int) -> int:
    """The largest power of two that divides a positive number."""
    return number & -number


def rotated(weight: Tensor, rotation: Rotation, dim: int = -1, scale: Tensor | None = None) -> Tensor:
    """A weight of at least one dimension whose slices along `dim` are rotated in float64, in its own dtype again.

    Along the input dimension of a linear layer that is `W R`, along its output dimension `R' W`. `scale` multiplies
    the slices before: `W diag(scale) R`.
    """
    rows = weight.movedim(dim, -1)
    flat = rows.reshape(-1, rotation.size)
    step = max(1, _CHUNK // rotation.size)
    parts = []
    for part in flat.split(step):
        wide = part.to(torch.float64)
        parts.append(rotation.apply(wide if scale is None else wide * scale).to(weight.dtype))
    return torch.cat(parts).reshape(rows.shape).movedim(-1, dim).contiguous()
