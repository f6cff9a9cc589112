"""A Prometheus histogram for what is observed with every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class PlainHistogram(Collector):
    """One series of a histogram. `buckets` are the upper bounds, ascending, without infinity.

    prometheus_client's own takes two locks and walks through the buckets at each observation, a tenth of what a server
    spends on a token. This one is not thread-safe: the event loop alone observes.
    """

    def __init__(
        self, name: str, text: str, buckets: Iterable[float], names: Sequence[str], values: Sequence[str]
    ) -> None:
        self._name, self._text, self._names, self._values = name, text, names, values
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """The cumulative counts at this moment."""
        total, buckets = 0, []
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))
        family = HistogramMetricFamily(self._name, self._text, labels=self._names)
        family.add_metric(self._values, buckets, self._sum)
        yield family
