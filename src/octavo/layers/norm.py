"""Root-mean-square normalization."""

from __future__ import annotations

from torch import Tensor

from octavo import ops
from octavo.layers.layer import Layer


class RMSNorm(Layer):
    """`x / sqrt(mean(x^2) + eps) * weight`, computed in float32 (Zhang and Sennrich, 2019).

    Called with a residual it first adds `x` to the residual in place and normalizes the sum, which is what a
    pre-norm decoder does between its blocks.
    """

    def __init__(self, weight: Tensor, eps: float, deterministic: bool = False) -> None:
        super().__init__()
        self.deterministic = deterministic
        self.weight = weight.contiguous()
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x` [T, H], `residual` [T, H] (changed in place) -> the normalized rows [T, H]."""
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps, deterministic=self.deterministic)
        return ops.add_rms_norm(x, residual, self.weight, self.eps, self.deterministic)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, dtype={str(self.weight.dtype).removeprefix('torch.')}"
