"""GPTQ on plain tensors: round the columns of a weight one by one, each error is made good by the columns after it.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2022). Rows are independent, so several layers that read the same input are solved as one.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.observers import choose_scales
from octavo.compress.rounding import code_range, dequantize, quantize
from octavo.compress.threads import one_thread_an_operation

_DAMPING_STEPS = (1.0, 10.0, 100.0)
_TRIANGLE = 192  # size of a triangular matrix that is inverted at once
_SMALL = 1024  # size up to which a Hessian is factored by one thread, in less time than a team needs to meet
_LEAF = 16  # columns whose updates are made at once, one by one; larger spans go through matrix products


@dataclass(frozen=True)
class GPTQSettings:
    """`dampening_frac` is added to the Hessian's diagonal, in units of its mean; `block_size` columns are solved before
    the rest of the weight is brought up to date; `act_order` takes columns by falling importance, else as they are."""

    block_size: int = 128
    dampening_frac: float = 0.01
    act_order: bool = True
    observer: str = "imatrix_signed"


@dataclass
class Solution:
    """`codes` int8 [N, K], `scale` float32 [N, G] (exactly representable in the scale's dtype).

    `error` and `norm` are per row: (W - W') H (W - W')' and W H W', so their quotient is the relative squared error of
    the layer's output. `damping` is the fraction that made the Hessian positive definite, None when none did and the
    weight was only rounded. `dead` counts inputs that were zero in every token.
    """

    codes: Tensor
    scale: Tensor
    error: Tensor
    norm: Tensor
    damping: float | None
    dead: int


def solve(
    weight: Tensor, hessian: Tensor, scheme: WeightScheme, settings: GPTQSettings, scale_dtype: torch.dtype
) -> Solution:
    """Quantize float32 weight [N, K] for inputs with the float32 Hessian X'X [K, K] (any positive factor).

    The scales are chosen on the weight as it comes, each input weighed by the Hessian's diagonal, so groups are of
    neighbouring columns in whatever order the columns are taken and nothing about the order needs to be stored.
    Inputs that were zero in every token are dead: their weights become zero.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    target = weight.masked_fill(dead, 0.0)
    order = torch.argsort(diagonal, descending=True) if settings.act_order else torch.arange(len(diagonal))
    with one_thread_an_operation() if len(order) <= _SMALL else nullcontext():
        factor, damping = inverse_factor(hessian[order][:, order], settings.dampening_frac)
    scale = choose_scales(target, diagonal, scheme, settings.observer, scale_dtype)
    norm = _quadratic(target, hessian)
    if factor is None or damping is None:
        codes = quantize(target, scale, scheme.num_bits)
        error = _quadratic(dequantize(codes, scale).sub_(target), hessian)
    else:
        columns = _Columns(target, scale, order, factor, scheme.num_bits)
        codes = columns.round_all(settings.block_size)
        # The column errors squared sum up to the quadratic form of the damped Hessian; the damping's part is taken off.
        difference = dequantize(codes, scale).sub_(target).square_().sum(dim=1)
        error = columns.errors.square_().sum(dim=0).sub_(difference * (damping * diagonal.mean())).clamp_min_(0)
    return Solution(codes, scale, error, norm, damping, int(dead.sum()))


def _quadratic(rows: Tensor, hessian: Tensor) -> Tensor:
    return torch.linalg.vecdot(rows @ hessian, rows)


def inverse_factor(hessian: Tensor, dampening_frac: float) -> tuple[Tensor | None, float | None]:
    """Upper triangular U with U'U = inverse of the damped Hessian, and the damping; (None, None) when none suffices.

    The Hessian is read from its last column to its first: with J the reversal, chol(J H J) = L gives H = R R' for the
    upper triangular R = J L J, so U is the inverse of R. That is half the work of inverting H first, and more exact.
    Ten and a hundred times the damping are tried before giving up.
    """
    diagonal = hessian.diagonal().clone()
    empty = diagonal == 0
    mean = diagonal.mean()
    for step in _DAMPING_STEPS:
        fraction = dampening_frac * step
        damped = hessian.clone()
        damped.diagonal().copy_(torch.where(empty, torch.ones_like(diagonal), diagonal) + fraction * mean)
        lower, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if int(info) == 0 and bool(torch.isfinite(lower).all()):
            return _lower_inverse(lower).flip(0, 1).contiguous(), fraction
    return None, None


def _lower_inverse(lower: Tensor) -> Tensor:
    """Inverse of a lower triangular matrix by halves, so that most of it is matrix products."""
    size = len(lower)
    if size <= _TRIANGLE:
        return torch.linalg.solve_triangular(lower, torch.eye(size, dtype=lower.dtype), upper=False)
    half = size // 2
    first, last = _lower_inverse(lower[:half, :half]), _lower_inverse(lower[half:, half:])
    inverse = torch.zeros_like(lower)
    inverse[:half, :half], inverse[half:, half:] = first, last
    inverse[half:, :half] = (last @ lower[half:, :half] @ first).neg_()
    return inverse


class _Columns:
    """A weight on its side: rows of `work` [K, N] are its columns in the order in which they are taken."""

    def __init__(self, weight: Tensor, scale: Tensor, order: Tensor, factor: Tensor, num_bits: int) -> None:
        self.order, self.factor = order, factor
        self.low, self.high = code_range(num_bits)
        self.work = weight.t()[order].contiguous()
        self.steps = scale.t()[order // (weight.shape[1] // scale.shape[1])].contiguous()
        self.codes = torch.empty_like(self.work)
        self.errors = torch.empty_like(self.work)
        self.diagonal = factor.diagonal().tolist()

    def round_all(self, block_size: int) -> Tensor:
        """int8 codes [N, K] in the weight's own order."""
        columns, rows = self.work.shape
        for start in range(0, columns, block_size):
            stop = min(start + block_size, columns)
            with one_thread_an_operation():
                self._round_span(start, stop)
            if stop < columns:
                self.work[stop:].addmm_(self.factor[start:stop, stop:].t(), self.errors[start:stop], alpha=-1)
        codes = torch.empty(columns, rows, dtype=torch.int8)
        codes[self.order] = self.codes.to(torch.int8)
        return codes.t().contiguous()

    def _round_span(self, start: int, stop: int) -> None:
        """Columns start..stop, which are up to date when this begins; leaves their codes and errors.

        Halves until few columns are left: the second half is brought up to date by one matrix product.
        """
        if stop - start > _LEAF:
            middle = start + (stop - start + 1) // 2
            self._round_span(start, middle)
            update = self.factor[start:middle, middle:stop].t()
            self.work[middle:stop].addmm_(update, self.errors[start:middle], alpha=-1)
            self._round_span(middle, stop)
            return
        for column in range(start, stop):
            value, code, error, step = self.work[column], self.codes[column], self.errors[column], self.steps[column]
            torch.div(value, step, out=code)
            code.round_().clamp_(self.low, self.high)
            torch.addcmul(value, code, step, value=-1, out=error)
            error.div_(self.diagonal[column])
            if column + 1 < stop:
                self.work[column + 1 : stop].addr_(self.factor[column, column + 1 : stop], error, alpha=-1)
