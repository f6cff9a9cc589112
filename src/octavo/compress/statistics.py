"""What calibration learns about the inputs of a linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 14  # tokens a product: keeps the float32 copy of the inputs small
_PANELS = 6  # into which the Hessian is cut; more of them compute less of the unneeded half, in smaller products


class InputStatistics:
    """The Hessian X'X (float32 [K, K]) of all inputs X [tokens, K], or its diagonal alone.

    Rows with non-finite values are left out and counted: one of them would spoil every entry.
    """

    def __init__(self, in_features: int, kind: str) -> None:
        self.kind = kind
        self.tokens = 0
        self.non_finite = 0
        shape = (in_features, in_features) if kind == "hessian" else (in_features,)
        self._sum = torch.zeros(shape, dtype=torch.float32)

    def add(self, inputs: Tensor) -> None:
        """Add inputs [..., K] of any float dtype."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).cpu()
        finite = torch.isfinite(rows).all(dim=1) if not bool(torch.isfinite(rows.sum())) else None
        if finite is not None:
            self.non_finite += int((~finite).sum())
            rows = rows[finite]
        self.tokens += len(rows)
        for chunk in rows.split(_CHUNK):
            if self.kind == "hessian":
                _add_gram(self._sum, chunk)
            else:
                self._sum += chunk.float().square().sum(dim=0)

    def hessian(self) -> Tensor:
        """X'X, float32 [K, K], symmetric."""
        return self._sum.tril() + self._sum.tril(-1).t()

    def diagonal(self) -> Tensor:
        """Sum of squares of each input, float32 [K]."""
        return self._sum.diagonal() if self.kind == "hessian" else self._sum


def _add_gram(total: Tensor, rows: Tensor) -> None:
    """Add the lower triangle of rows' rows to `total`, by panels of columns since the upper half is not needed.

    Inputs that are bfloat16 are multiplied as such and summed in float32, which is exact up to the summation and twice
    as fast where the CPU can do it.
    """
    size = rows.shape[1]
    width = max(128, -(-size // (64 * _PANELS)) * 64)
    wide = rows.float()
    with _bfloat16_products(rows.dtype == torch.bfloat16):
        for start in range(0, size, width):
            stop = min(start + width, size)
            total[start:, start:stop].addmm_(wide[:, start:].t(), wide[:, start:stop])


@contextmanager
def _bfloat16_products(wanted: bool) -> Iterator[None]:
    """float32 matrix products on the CPU may round their inputs to bfloat16 inside (harmless if they are bfloat16)."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if wanted:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
