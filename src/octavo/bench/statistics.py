"""Percentiles, means and shares with their uncertainty, in plain Python.

Percentiles interpolate linearly between order statistics (numpy's default). Intervals are 95 % and speak of this run's
requests as a sample; they do not cover how a second run on another day would differ.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from typing import Any

PERCENTILES = (50, 90, 95, 99)
Interval = list[float | None]


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100) of sorted values, by linear interpolation. ValueError when there are none."""
    if not ordered:
        raise ValueError("a percentile needs at least one value")
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by Lentz's continued fraction (Numerical Recipes 6.4)."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    result = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for term in (even, odd):
            d = 1 + term * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + term / c
            c = c if abs(c) > tiny else tiny
            change = d * c
            result *= change
        if abs(change - 1) < 1e-14:
            break
    return front * result


@cache
def t_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t for a probability in (0.5, 1), by bisection on its distribution function."""
    low, high = 0.0, 1.0
    tail = 2 * (1 - probability)

    def two_sided(t: float) -> float:
        return incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))

    while two_sided(high) > tail:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if two_sided(middle) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def mean_interval(values: Sequence[float], clusters: Sequence[int] | None = None) -> Interval | None:
    """95 % interval of the mean by Student's t; None below two independent units.

    With `clusters` (how many consecutive values belong to each request) the requests are the independent units: gaps
    inside one request share its neighbours, so treating them as independent would make the interval far too narrow.
    """
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    if clusters is None:
        units = n
        error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n) if n > 1 else 0.0
    else:
        units = sum(1 for size in clusters if size)
        error = _cluster_error([v - mean for v in values], clusters)
    if units < 2:
        return None
    half = t_quantile(0.975, units - 1) * error
    return [mean - half, mean + half]


def quantile_interval(ordered: Sequence[float], q: float) -> Interval:
    """95 % interval of the q-th percentile of independent values, from order statistics (exact binomial ranks).

    A bound is None where the sample is too small to give it: 99 % of ten requests has no upper bound.
    """
    n, p = len(ordered), q / 100
    low = _binomial_rank(n, p, 0.025)  # P(fewer than `low` values lie below the percentile) <= 2.5 %
    high = _binomial_rank(n, p, 0.975) + 1
    return [ordered[low - 1] if low >= 1 else None, ordered[high - 1] if high <= n else None]


def clustered_quantile_interval(
    values: Sequence[float], ordered: Sequence[float], clusters: Sequence[int], q: float
) -> Interval:
    """95 % interval of a percentile of clustered values, by the error of the share below it (Woodruff 1952)."""
    centre, p, n = percentile(ordered, q), q / 100, len(ordered)
    units = sum(1 for size in clusters if size)
    if units < 2:
        return [None, None]
    share = bisect_right(ordered, centre) / n
    error = _cluster_error([(1.0 if v <= centre else 0.0) - share for v in values], clusters)
    half = t_quantile(0.975, units - 1) * max(error, math.sqrt(p * (1 - p) / n))
    low, high = p - half, p + half
    return [percentile(ordered, 100 * low) if low > 0 else None, percentile(ordered, 100 * high) if high < 1 else None]


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; (0, 1) without trials. It stays inside 0..1 and is honest near both ends."""
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    spread = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    centre = p + z * z / (2 * trials)
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def slope_interval(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the slope of a least-squares line; None below three points or when all x are equal."""
    n = len(xs)
    if n < 3:
        return None
    mx, my = math.fsum(xs) / n, math.fsum(ys) / n
    sxx = math.fsum((x - mx) ** 2 for x in xs)
    if sxx == 0:
        return None
    slope = math.fsum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sxx
    residual = math.fsum((y - my - slope * (x - mx)) ** 2 for x, y in zip(xs, ys, strict=True))
    half = t_quantile(0.975, n - 2) * math.sqrt(residual / (n - 2) / sxx)
    return slope - half, slope + half


def summarize(values: Sequence[float], clusters: Sequence[int] | None = None) -> dict[str, Any]:
    """Mean, median, standard deviation, extremes, percentiles and intervals; every figure None without values."""
    if not values:
        keys = ["mean", "median", "std", "min", "max", *(f"p{q}" for q in PERCENTILES), "mean_ci95", "p99_ci95"]
        return dict.fromkeys(keys, None) | {"count": 0}
    ordered, n = sorted(values), len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1) if n > 1 else 0.0
    if clusters is None:
        p99 = quantile_interval(ordered, 99)
    else:
        p99 = clustered_quantile_interval(values, ordered, clusters, 99)
    return {
        "mean": mean,
        "median": percentile(ordered, 50),
        "std": math.sqrt(variance),
        "min": ordered[0],
        "max": ordered[-1],
        **{f"p{q}": percentile(ordered, q) for q in PERCENTILES},
        "count": n,
        "mean_ci95": mean_interval(values, clusters),
        "p99_ci95": p99,
    }


def _cluster_error(deviations: Sequence[float], clusters: Sequence[int]) -> float:
    """Standard error of a mean whose independent units are clusters (linearized ratio estimator)."""
    position, squares = 0, 0.0
    for size in clusters:
        total = math.fsum(deviations[position : position + size])
        squares += total * total
        position += size
    units = sum(1 for size in clusters if size)
    if units < 2 or not deviations:
        return 0.0
    return math.sqrt(squares * units / (units - 1)) / len(deviations)


def _binomial_rank(n: int, p: float, probability: float) -> int:
    """The smallest k with P(X <= k) > probability, X binomial(n, p)."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        # P(X <= k) = I_{1-p}(n - k, k + 1), and 1 at k = n
        if middle == n or incomplete_beta(n - middle, middle + 1, 1 - p) > probability:
            high = middle
        else:
            low = middle + 1
    return low
