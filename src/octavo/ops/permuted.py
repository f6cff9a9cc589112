"""A packed weight whose columns are in another order than the inputs, as GPTQ leaves them in its activation order."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.packed_weight import PackedWeight


class PermutedWeight(PackedWeight):
    """`inner` with the columns of its inputs gathered first: column k is that of input order[k] (int64 [K])."""

    def __init__(self, inner: PackedWeight, order: Tensor, device: torch.device) -> None:
        self.name = f"{inner.name}, permuted"
        self.shape, self.input_kind, self.input_scale = inner.shape, inner.input_kind, inner.input_scale
        self.inner, self.order = inner, order.to(device)

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes + self.order.nbytes

    @property
    def dense_copy_bytes(self) -> int:
        return self.inner.dense_copy_bytes

    def keep_dense_copy(self) -> None:
        self.inner.keep_dense_copy()

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        return self.inner.linear(x.index_select(1, self.order), bias, out_dtype)

    def linear_quantized(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        residual: Tensor | None = None,
    ) -> Tensor:
        return self.inner.linear_quantized(codes.index_select(1, self.order), scale, bias, out_dtype, residual)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        found = self.inner.rows(ids, dtype)
        return torch.empty_like(found).index_copy_(found.dim() - 1, self.order, found)
