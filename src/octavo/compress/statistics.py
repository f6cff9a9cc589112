"""What calibration learns about the inputs of a linear layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.ops.gram import add_drift, add_gram, panels

KINDS = ("diagonal", "hessian", "drift", "absmean", "range", "rows")
SAMPLED_ROWS = 512
_CHUNK = 1 << 14  # tokens a product, or as many as have this many values: keeps the float32 copy of the inputs small
_CHUNK_VALUES = 1 << 26


class InputStatistics:
    """Facts about all inputs X [tokens, K] of a layer, as far as `kinds` asks for them.

    "hessian" X'X [K, K]; "diagonal" its diagonal alone; "drift" (X* - X)'X [K, K], where X* are the same tokens' inputs
    in the model as it came; "absmean" the mean magnitude of each input [K]; "range" the smallest and largest value of
    each [K]; "rows" up to 512 rows, evenly spread over each batch. Rows with non-finite values are left out and
    counted: one of them would spoil everything.
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
        self._drift: Tensor | None = None  # made with the first inputs, dropped where X* is not known
        self._squares = torch.zeros(shape, dtype=torch.float32, device=device)
        self._magnitudes = torch.zeros(in_features, dtype=torch.float32, device=device)
        self._minimum = torch.full((in_features,), torch.inf, device=device)
        self._maximum = torch.full((in_features,), -torch.inf, device=device)

    def add(self, inputs: Tensor, exact: Tensor | None = None) -> None:
        """Add inputs [..., K] of any float dtype; `exact` has what they were in the model as it came, if known."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).to(self._device)
        finite = torch.isfinite(rows).all(dim=1) if not bool(torch.isfinite(rows.sum())) else None
        if finite is not None:
            self.non_finite += int((~finite).sum())
            rows = rows[finite]
        if not len(rows):
            return
        if "drift" in self.kinds:
            self._add_drift(rows, None if exact is None else exact.detach().reshape(-1, self.in_features), finite)
        self.tokens += len(rows)
        for chunk in rows.split(max(1, min(_CHUNK, _CHUNK_VALUES // self.in_features))):
            self._add_chunk(chunk)
        if "rows" in self.kinds:
            self._rows.append(_spread(rows, SAMPLED_ROWS).float())

    def _add_drift(self, rows: Tensor, exact: Tensor | None, finite: Tensor | None) -> None:
        given = len(rows) if finite is None else len(finite)  # an expert may have been sent fewer tokens than exact has
        if exact is None or len(exact) != given or (self._drift is None and self.tokens > 0):
            self._drift = None
            return
        if finite is not None:
            exact = exact[finite]
        if self._drift is None:
            self._drift = torch.zeros(self.in_features, self.in_features, device=self._device)
        size = max(1, min(_CHUNK, _CHUNK_VALUES // self.in_features))
        for those, these in zip(exact.to(self._device).split(size), rows.split(size), strict=True):
            add_drift(those, these, self._drift)

    def _add_chunk(self, rows: Tensor) -> None:
        if "hessian" in self.kinds:
            add_gram(rows, self._squares)
        elif "diagonal" in self.kinds:
            self._squares += rows.float().square().sum(dim=0)
        if "absmean" in self.kinds:
            self._magnitudes += rows.float().abs().sum(dim=0)
        if "range" in self.kinds:
            torch.minimum(self._minimum, rows.amin(dim=0).float(), out=self._minimum)
            torch.maximum(self._maximum, rows.amax(dim=0).float(), out=self._maximum)

    def hessian(self) -> Tensor:
        """X'X, float32 [K, K], symmetric; not a copy (one of 14,336 inputs takes 822 MB)."""
        self._require("hessian")
        _mirror(self._squares)
        return self._squares

    def drift(self) -> Tensor | None:
        """(X* - X)'X, float32 [K, K]; None where X* was not known for all inputs."""
        self._require("drift")
        return self._drift

    def diagonal(self) -> Tensor:
        """Sum of squares of each input, float32 [K]."""
        if "hessian" in self.kinds:
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
