"""What calibration learns about the inputs of a linear layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.gram import add_drift, add_gram, panels

KINDS = ("diagonal", "hessian", "drift", "absmean", "range", "rows")
SAMPLED_ROWS = 512
_CHUNK = 1 << 14  # tokens a product, or as many as have this many values: keeps the float32 copy of the inputs small
_CHUNK_VALUES = 1 << 26


class Drift(NamedTuple):
    """Of some tokens: total (X* - X)'X, and squares X'X, float32 [K, K] each."""

    total: Tensor
    squares: Tensor


class InputStatistics:
    """Facts about all inputs X [tokens, K] of a layer, as far as `kinds` asks for them.

    "hessian" X'X [K, K]; "diagonal" its diagonal alone; "drift" (X* - X)'X [K, K] of those tokens whose inputs X* in
    the model as it came are known; "absmean" the mean magnitude of each input [K]; "range" the smallest and largest
    value of each [K]; "rows" up to 512 rows, evenly spread over each batch. Rows with non-finite values are left out
    and counted: one of them would spoil everything.
    """

    def __init__(self, in_features: int, kinds: Iterable[str], device: torch.device | str = "cpu") -> None:
        self.kinds = frozenset(kinds)
        if unknown := self.kinds - set(KINDS):
            raise ValueError(f"unknown statistics {sorted(unknown)}; known are {KINDS}")
        self.tokens = 0
        self.non_finite = 0
        self.in_features = in_features
        self._rows: list[Tensor] = []
        self._device = device
        shape = (in_features, in_features) if "hessian" in self.kinds else (in_features,)
        self._drift: Drift | None = None  # made with the first X* that is known
        self._is_unknown = self._is_settled = False
        self._squares = torch.zeros(shape, dtype=torch.float32, device=device)
        self._magnitudes = torch.zeros(in_features, dtype=torch.float32, device=device)
        self._minimum = torch.full((in_features,), torch.inf, device=device)
        self._maximum = torch.full((in_features,), -torch.inf, device=device)

    def add(self, inputs: Tensor, exact: Tensor | None = None) -> None:
        """Add inputs [..., K] of any float dtype; `exact` has what they were in the model as it came, where known."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).to(self._device)
        finite = torch.isfinite(rows).all(dim=1) if not bool(torch.isfinite(rows.sum())) else None
        if finite is not None:
            self.non_finite += int((~finite).sum())
            rows = rows[finite]
        if not len(rows):
            return
        self.tokens += len(rows)
        squares = self._squares
        if "drift" in self.kinds and exact is not None:
            exact = exact.detach().reshape(-1, self.in_features).to(self._device)
            squares = self._add_drift(rows, exact if finite is None else exact[finite])
        for chunk in rows.split(self._at_once()):
            self._add_chunk(chunk, squares)
        if "rows" in self.kinds:
            self._rows.append(_spread(rows, SAMPLED_ROWS).float())

    def forget_drift(self) -> None:
        """X* should be known for some inputs and is not: there is no drift."""
        if self._drift is not None:
            self._squares += self._drift.squares
        self._drift, self._is_unknown = None, True

    def _add_drift(self, rows: Tensor, exact: Tensor) -> Tensor:
        """Where the squares of these rows belong."""
        if self._is_unknown:
            return self._squares
        if self._drift is None:
            self._drift = Drift(torch.zeros_like(self._squares), torch.zeros_like(self._squares))
        for those, these in zip(exact.split(self._at_once()), rows.split(self._at_once()), strict=True):
            add_drift(those, these, self._drift.total)
        return self._drift.squares

    def _at_once(self) -> int:
        return max(1, min(_CHUNK, _CHUNK_VALUES // self.in_features))

    def _add_chunk(self, rows: Tensor, squares: Tensor) -> None:
        if "hessian" in self.kinds:
            add_gram(rows, squares)
        elif "diagonal" in self.kinds:
            squares += rows.float().square().sum(dim=0)
        if "absmean" in self.kinds:
            self._magnitudes += rows.float().abs().sum(dim=0)
        if "range" in self.kinds:
            torch.minimum(self._minimum, rows.amin(dim=0).float(), out=self._minimum)
            torch.maximum(self._maximum, rows.amax(dim=0).float(), out=self._maximum)

    def hessian(self) -> Tensor:
        """X'X, float32 [K, K], symmetric; not a copy (one of 14,336 inputs takes 822 MB)."""
        self._require("hessian")
        self._settle()
        _mirror(self._squares)
        return self._squares

    def drift(self) -> Drift | None:
        """(X* - X)'X and X'X of the tokens whose X* is known; None where there are none."""
        self._require("drift")
        self._settle()
        return self._drift

    def _settle(self) -> None:
        """All tokens' squares are those of both kinds of tokens, which are added up apart."""
        if self._drift is not None and not self._is_settled:
            self._squares += self._drift.squares
            _mirror(self._drift.squares)
            self._is_settled = True

    def diagonal(self) -> Tensor:
        """Sum of squares of each input, float32 [K]."""
        if "hessian" in self.kinds:
            self._settle()
            return self._squares.diagonal()
        self._require("diagonal")
        return self._squares

    def absmean(self) -> Tensor:
        """Mean magnitude of each input, float32 [K]."""
        self._require("absmean")
        return self._magnitudes / max(self.tokens, 1)

    def minimum(self) -> Tensor:
        """Smallest value of each input, float32 [K]."""
        self._require("range")
        return self._minimum

    def maximum(self) -> Tensor:
        """Largest value of each input, float32 [K]."""
        self._require("range")
        return self._maximum

    def rows(self) -> Tensor:
        """Some inputs as they were, float32 [at most 512, K]."""
        self._require("rows")
        if not self._rows:
            return torch.empty(0, self.in_features, device=self._device)
        return _spread(torch.cat(self._rows), SAMPLED_ROWS)

    def _require(self, kind: str) -> None:
        if kind not in self.kinds:
            raise ValueError(f"{kind} was not gathered; this has {sorted(self.kinds)}")


def _spread(rows: Tensor, count: int) -> Tensor:
    """At most `count` rows at even distances."""
    if len(rows) <= count:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count, device=rows.device).long()]


def _mirror(total: Tensor) -> None:
    """Make a matrix symmetric whose lower triangle holds."""
    for start, stop in panels(len(total)):
        corner = total[start:stop, start:stop]
        corner.copy_(corner.tril() + corner.tril(-1).t())
        total[start:stop, stop:] = total[stop:, start:stop].t()
