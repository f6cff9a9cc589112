"""Which weights of a linear layer become zero, and how the others make good for it.

Magnitude takes the smallest weights. Wanda (Sun et al., "A Simple and Effective Pruning Approach for Large Language
Models", 2023) weighs each by the size of its input. SparseGPT (Frantar and Alistarh, 2023) goes through the columns as
GPTQ does: the error of each weight that is dropped is made good by the columns after it.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.compress.threads import one_thread_an_operation
from octavo.errors import UserError

_LEAF = 16  # columns whose updates are made at once, one by one; larger spans go through matrix products


@dataclass(frozen=True)
class MaskStructure:
    """`zeros` of every `of` neighbouring inputs of a row; 0 of 0: zeros where they hurt least."""

    zeros: int = 0
    of: int = 0

    @classmethod
    def parse(cls, text: str) -> MaskStructure:
        """ "2:4" or "0:0"; UserError for anything else."""
        match = re.fullmatch(r"(\d+):(\d+)", text.strip()) if isinstance(text, str) else None
        zeros, of = (int(match[1]), int(match[2])) if match else (-1, -1)
        if (zeros, of) != (0, 0) and not 0 < zeros < of:
            raise UserError(
                f"mask_structure is {text!r}; it must be '0:0' (unstructured) or 'N:M' with 0 < N < M, N zeros in "
                "every M neighbouring weights, such as '2:4'",
                param="mask_structure",
            )
        return cls(zeros, of)

    @property
    def is_free(self) -> bool:
        """Whether zeros may be anywhere."""
        return self.of == 0

    def __str__(self) -> str:
        return f"{self.zeros}:{self.of}"


def smallest(scores: Tensor, sparsity: float, structure: MaskStructure, by_row: bool) -> Tensor:
    """bool [N, K]: where the smallest of `scores` [N, K] are, of each group of the structure, else the share
    `sparsity` of each row or of them all."""
    if structure.is_free:
        rows = scores if by_row else scores.reshape(1, -1)
        count = _count(rows.shape[1], sparsity)
    else:
        rows, count = scores.reshape(-1, structure.of), structure.zeros
    chosen = rows.topk(count, dim=1, largest=False, sorted=False).indices
    return torch.zeros_like(rows, dtype=torch.bool).scatter_(1, chosen, True).reshape(scores.shape)


def _count(elements: int, sparsity: float) -> int:
    return int(elements * sparsity + 1e-6)


def magnitude_mask(weight: Tensor, sparsity: float, structure: MaskStructure, preserve: bool = False) -> Tensor:
    """bool [N, K], true where a weight is to be zero: the smallest of the layer. `preserve` keeps zeros that are there,
    which count."""
    return _with_zeros(weight, smallest(_scored(weight, weight.abs(), preserve), sparsity, structure, False), preserve)


def wanda_mask(
    weight: Tensor, squares: Tensor, sparsity: float, structure: MaskStructure, preserve: bool = False
) -> Tensor:
    """As `magnitude_mask`, by |weight| times the norm of its input, in each row; `squares` [K] sums an input's."""
    scores = weight.abs() * squares.sqrt()
    return _with_zeros(weight, smallest(_scored(weight, scores, preserve), sparsity, structure, True), preserve)


def _scored(weight: Tensor, scores: Tensor, preserve: bool) -> Tensor:
    return scores.masked_fill(weight == 0, -1.0) if preserve else scores


def _with_zeros(weight: Tensor, mask: Tensor, preserve: bool) -> Tensor:
    return mask | (weight == 0) if preserve else mask


def sparsegpt(
    weight: Tensor,
    factor: Tensor,
    dead: Tensor,
    sparsity: float,
    structure: MaskStructure,
    block_size: int = 128,
    preserve: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prune float32 weight [N, K] with the upper triangular factor U [K, K] of the inverse Hessian (`inverse_factor`).

    `dead` bool [K] marks inputs that are always zero; their weights become zero. Masks are chosen anew in every block
    of `block_size` columns, or in every group of the structure, on weights that are up to date. Returns the new
    weight [N, K], its mask (true: zero), and the damped squared error of each row [N].
    """
    columns = _Columns(weight.masked_fill(dead, 0.0), factor, sparsity, structure, preserve)
    columns.prune_all(block_size)
    mask = columns.drop.t().contiguous() | dead
    return columns.work.t().contiguous().masked_fill_(mask, 0.0), mask, columns.errors.square().sum(dim=0)


class _Columns:
    """A weight on its side: rows of `work` [K, N] are its columns; `drop` marks what becomes zero."""

    def __init__(
        self, weight: Tensor, factor: Tensor, sparsity: float, structure: MaskStructure, preserve: bool
    ) -> None:
        self.sparsity, self.structure, self.factor = sparsity, structure, factor
        self.work = weight.t().contiguous()
        self.errors = torch.empty_like(self.work)
        self.kept_zeros = self.work == 0 if preserve else None
        self.drop = torch.zeros_like(self.work, dtype=torch.bool)
        self.step = 1 if structure.is_free else structure.of
        self.leaf = max(1, _LEAF // self.step) * self.step
        self.importance = factor.diagonal().square().unsqueeze(1)
        self.diagonal = factor.diagonal().tolist()

    def prune_all(self, block_size: int) -> None:
        columns, width = len(self.work), max(1, block_size // self.step) * self.step
        for start in range(0, columns, width):
            stop = min(start + width, columns)
            with nullcontext() if self.work.is_cuda else one_thread_an_operation():
                if self.structure.is_free:
                    self._choose(start, stop)
                self._prune_span(start, stop)
            if stop < columns:
                self.work[stop:].addmm_(self.factor[start:stop, stop:].t(), self.errors[start:stop], alpha=-1)

    def _choose(self, start: int, stop: int) -> None:
        """The mask of columns start..stop, which are up to date."""
        scores = self.work[start:stop].square() / self.importance[start:stop]
        if self.kept_zeros is not None:
            scores.masked_fill_(self.kept_zeros[start:stop], -1.0)
        if self.structure.is_free:
            chosen = smallest(scores, self.sparsity, self.structure, by_row=False)
        else:
            places = scores.topk(self.structure.zeros, dim=0, largest=False, sorted=False).indices
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(0, places, True)
        self.drop[start:stop] = chosen if self.kept_zeros is None else chosen | self.kept_zeros[start:stop]

    def _prune_span(self, start: int, stop: int) -> None:
        """Columns start..stop, which are up to date when this begins; leaves their errors.

        Halves until few columns are left: the second half is brought up to date by one matrix product.
        """
        if stop - start > self.leaf:
            middle = start + max(1, (stop - start) // 2 // self.step) * self.step
            self._prune_span(start, middle)
            update = self.factor[start:middle, middle:stop].t()
            self.work[middle:stop].addmm_(update, self.errors[start:middle], alpha=-1)
            self._prune_span(middle, stop)
            return
        for column in range(start, stop):
            if not self.structure.is_free and column % self.step == 0:
                self._choose(column, column + self.step)
            torch.mul(self.work[column], self.drop[column], out=self.errors[column])
            self.errors[column].div_(self.diagonal[column])
            if column + 1 < stop:
                self.work[column + 1 : stop].addr_(
                    self.factor[column, column + 1 : stop], self.errors[column], alpha=-1
                )
