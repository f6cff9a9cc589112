"""GPTQ on plain tensors: round the columns of a weight one by one, each error is made good by the columns after it.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2022). Rows are independent, so several layers that read the same input are solved as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.number_formats import NumberFormat, format_of
from octavo.compress.observers import choose_grid
from octavo.compress.rounding import Grid, dequantize, global_scale, group_width, quantize
from octavo.compress.statistics import Drift
from octavo.compress.threads import one_thread_an_operation
from octavo.ops.gptq_columns import Columns, round_columns
from octavo.ops.gram import bfloat16_products

_DAMPING_STEPS = (1.0, 10.0, 100.0)
_TRIANGLE = 192  # size of a triangular matrix that is inverted at once
_ALIGNMENT = 0.25  # of the way to the weights that fit the drift best; all of it fits the noise of few tokens too
_SMALL = 1024  # size up to which a Hessian is factored by one thread, in less time than a team needs to meet


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
    """`codes` [N, K] and their `grid`.

    `error` and `norm` are per row: (W - W') H (W - W')' and W H W', so their quotient is the relative squared error of
    the layer's output. `damping` is the fraction that made the Hessian positive definite, None when none did and the
    weight was only rounded. `dead` counts inputs that were zero in every token.
    """

    codes: Tensor
    grid: Grid
    error: Tensor
    norm: Tensor
    damping: float | None
    dead: int


def solve(
    weights: Sequence[Tensor],
    hessian: Tensor,
    scheme: WeightScheme,
    settings: GPTQSettings,
    scale_dtype: torch.dtype,
    masks: Sequence[Tensor | None] | None = None,
    drift: Drift | None = None,
    overall: float | None = None,
) -> list[Solution]:
    """Quantize float32 weights [N, K] of layers that read the same inputs, whose X'X is the float32 Hessian [K, K] (any
    positive factor).

    The scales are chosen on the weights as they come, each input weighed by what later ones cannot make good of its
    error, so groups are of neighbouring columns in whatever order the columns are taken and nothing about the order
    needs to be stored.
    Inputs that were zero in every token are dead: their weights become zero, as those do where `masks` (bool [N, K])
    are true. With `drift` outputs come closer to those of the weights on the inputs X* (GPTAQ), by `_ALIGNMENT`; the
    errors are those from the weights that are aimed at. `overall` is NVFP4's scale of all layers that
    are fused, by default of these.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    masks = masks or [None] * len(weights)
    order = _order(diagonal, settings.act_order)
    # Before the factor of all inputs is made, which takes as much memory as that of the known ones.
    shifts = None if drift is None else _shifts(weights, drift, settings.dampening_frac)
    with _threads_for(hessian):
        factor, damping = inverse_factor(hessian, order, settings.dampening_frac)
    aims = list(weights)
    if shifts is not None and factor is not None:
        aims = [shift.mul_(_ALIGNMENT).add_(weight) for weight, shift in zip(weights, shifts, strict=True)]
    del shifts
    is_dead = bool(dead.any())
    targets = [
        aim if m is None and not is_dead else aim.masked_fill(dead if m is None else m | dead, 0.0)
        for aim, m in zip(aims, masks, strict=True)
    ]
    del aims  # as large as the weights
    overall = overall or global_scale(targets, scheme)
    importance = diagonal if factor is None else _remaining_importance(factor, order)
    grids = [choose_grid(target, importance, scheme, settings.observer, scale_dtype, overall) for target in targets]
    if factor is None or damping is None:
        codes = [quantize(target, grid, scheme) for target, grid in zip(targets, grids, strict=True)]
        left = None
    else:
        sizes = [len(target) for target in targets]
        columns = _columns(targets, grids, scheme, order, factor, masks)
        codes = _round_all(columns, format_of(scheme), settings.block_size, order, sizes)
        left = columns.errors.square_().sum(dim=0).split(sizes)
        del columns, factor  # they make room for what follows: gigabytes in an 8B model
    solutions = []
    for index, (target, grid, code) in enumerate(zip(targets, grids, codes, strict=True)):
        difference = dequantize(code, grid, scheme).sub_(target)
        if left is None or damping is None:
            error = _quadratic(difference, hessian)
        else:
            # The column errors squared sum up to the quadratic form of the damped Hessian; its damping is taken off.
            error = left[index] - difference.square_().sum(dim=1) * (damping * diagonal.mean())
        norm = _quadratic(target, hessian)
        solutions.append(Solution(code, grid, error.clamp_min(0), norm, damping, int(dead.sum())))
    return solutions


def _threads_for(hessian: Tensor) -> AbstractContextManager[object]:
    """A small matrix on the CPU is factored by one thread."""
    return one_thread_an_operation() if len(hessian) <= _SMALL and not hessian.is_cuda else nullcontext()


def _shifts(weights: Sequence[Tensor], drift: Drift, dampening_frac: float) -> list[Tensor]:
    """What makes W + shift the best real weights for the inputs X as they will be: W (X* - X)'X (X'X)^-1.

    Both are of the same tokens, or what the two tell differently would be taken for a drift. Multiplied from the side
    that takes fewer operations. Three digits of a change that is small itself are enough, but not of what the inverse
    multiplies.
    """
    lower = _lower_factor(drift.squares, dampening_frac)
    if lower is None:
        return [torch.zeros_like(weight) for weight in weights]
    if sum(len(weight) for weight in weights) > len(lower):
        change = torch.cholesky_solve(drift.total.t(), lower).t()
        with bfloat16_products():
            return [weight @ change for weight in weights]
    with bfloat16_products():
        drifts = [weight @ drift.total for weight in weights]
    return [torch.cholesky_solve(rows.t(), lower).t() for rows in drifts]


def _lower_factor(squares: Tensor, dampening_frac: float) -> Tensor | None:
    """Cholesky's factor of a damped Hessian in the inputs' own order, or None as in `inverse_factor`."""
    diagonal = squares.diagonal()
    alive = torch.where(diagonal == 0, torch.ones_like(diagonal), diagonal)
    for step in _DAMPING_STEPS:
        damped = squares.clone()
        damped.diagonal().copy_(alive + dampening_frac * step * diagonal.mean())
        with _threads_for(damped):
            lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
            return lower
    return None


def _remaining_importance(factor: Tensor, order: Tensor) -> Tensor:
    """[K]: the squares of each input that the inputs taken after it do not explain, 1 / U_jj ** 2.

    An error in a column costs that much once the columns after it have made good what they can.
    """
    importance = torch.empty_like(factor.diagonal())
    importance[order] = factor.diagonal().square().reciprocal()
    return importance


def _order(diagonal: Tensor, by_importance: bool) -> Tensor:
    if by_importance:
        return torch.argsort(diagonal, descending=True)
    return torch.arange(len(diagonal), device=diagonal.device)


def _quadratic(rows: Tensor, hessian: Tensor) -> Tensor:
    """rows H rows' of each row."""
    return torch.linalg.vecdot(rows @ hessian, rows)


def inverse_factor(hessian: Tensor, order: Tensor, dampening_frac: float) -> tuple[Tensor | None, float | None]:
    """Upper triangular U with U'U = inverse of the damped Hessian, its rows and columns taken in `order`, and the
    damping; (None, None) when none suffices.

    The Hessian is read from its last column to its first: with J the reversal, chol(J H J) = L gives H = R R' for the
    upper triangular R = J L J, so U is the inverse of R. That is half the work of inverting H first, and more exact.
    Ten and a hundred times the damping are tried before giving up. Besides the Hessian, two matrices of its size are
    held at once.
    """
    backwards = order.flip(0)
    diagonal = hessian.diagonal()[backwards]
    mean, alive = diagonal.mean(), torch.where(diagonal == 0, torch.ones_like(diagonal), diagonal)
    for step in _DAMPING_STEPS:
        fraction = dampening_frac * step
        damped = hessian[backwards[:, None], backwards]
        damped.diagonal().copy_(alive + fraction * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        del damped
        if int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
            _invert_lower(lower)
            return lower.flip(0, 1), fraction
    return None, None


def _invert_lower(lower: Tensor) -> None:
    """Invert a lower triangular matrix in place, by halves, so that most of it is matrix products."""
    size = len(lower)
    if size <= _TRIANGLE:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    half = size // 2
    first, last, below = lower[:half, :half], lower[half:, half:], lower[half:, :half]
    _invert_lower(first)
    _invert_lower(last)
    below.copy_((last @ below @ first).neg_())


def _columns(
    weights: Sequence[Tensor],
    grids: Sequence[Grid],
    scheme: WeightScheme,
    order: Tensor,
    factor: Tensor,
    masks: Sequence[Tensor | None],
) -> Columns:
    """Weights on their sides and next to each other, their columns in `order`."""
    work = _side_by_side([weight.t()[order] for weight in weights])
    steps = torch.cat([grid.steps(scheme, len(w)).t() for w, grid in zip(weights, grids, strict=True)], dim=1)
    points = [grid.zero_point.t().float() for grid in grids if grid.zero_point is not None]
    zeros = torch.cat(points, dim=1) if points else None
    groups = (order // group_width(scheme, len(order))).to(torch.int32)
    keep = None
    if any(mask is not None for mask in masks):
        pruned = [
            torch.zeros_like(w, dtype=torch.bool) if m is None else m for w, m in zip(weights, masks, strict=True)
        ]
        keep = torch.cat([~mask.t()[order] for mask in pruned], dim=1)
    return Columns(work, torch.empty_like(work), torch.empty_like(work), factor, groups, steps, zeros, keep)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """Parts [K, N] as one; a single one is not copied, for it may take hundreds of megabytes."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _round_all(
    columns: Columns, number: NumberFormat, block_size: int, order: Tensor, sizes: list[int]
) -> list[Tensor]:
    """Codes [N, K] of each weight, in the weights' own order of columns."""
    count = len(columns.work)
    for start in range(0, count, block_size):
        stop = min(start + block_size, count)
        with nullcontext() if columns.work.is_cuda else one_thread_an_operation():
            round_columns(columns, start, stop, number)
        if stop < count:
            update = columns.factor[start:stop, stop:].t()
            columns.work[stop:].addmm_(update, columns.errors[start:stop], alpha=-1)
    levels = columns.levels
    if columns.zeros is not None:
        levels += columns.zeros[columns.groups]
    codes = number.encode(levels)
    restored = torch.empty_like(codes)
    restored[order] = codes
    return [part.t().contiguous() for part in restored.split(sizes, dim=1)]
