"""Percentiles, intervals and arrival processes against numpy, the standard library and closed forms."""

from __future__ import annotations

import itertools
import math
import random
import statistics as stdlib

import numpy as np
import pytest

from octavo.bench import statistics as s
from octavo.bench.profiles import constant_arrivals, poisson_arrivals, sweep_rates


@pytest.mark.parametrize("n", [1, 2, 3, 10, 101, 1000])
def test_percentiles_are_numpys(n: int) -> None:
    values = np.random.default_rng(n).lognormal(size=n).tolist()
    for q in (0, 1, 50, 90, 95, 99, 99.9, 100):
        assert s.percentile(sorted(values), q) == pytest.approx(float(np.percentile(values, q)), rel=1e-12)


def test_summary_is_the_standard_librarys() -> None:
    values = [random.Random(1).uniform(0, 100) for _ in range(57)]
    summary = s.summarize(values)
    assert summary["mean"] == pytest.approx(stdlib.fmean(values))
    assert summary["median"] == summary["p50"] == pytest.approx(stdlib.median(values))
    assert summary["std"] == pytest.approx(stdlib.stdev(values))
    assert (summary["min"], summary["max"], summary["count"]) == (min(values), max(values), 57)
    assert s.summarize([])["mean"] is None
    assert s.summarize([])["count"] == 0
    assert set(s.summarize([])) == set(summary)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.30265), (5, 2.57058), (10, 2.22814), (30, 2.04227), (1000, 1.96234)]
)
def test_t_quantile_is_the_tables(degrees: int, expected: float) -> None:
    assert s.t_quantile(0.975, degrees) == pytest.approx(expected, abs=1e-4)


def test_incomplete_beta_gives_binomial_tails() -> None:
    for n, p in itertools.product((1, 7, 40), (0.03, 0.5, 0.99)):
        total = 0.0
        for k in range(n):
            total += math.comb(n, k) * p**k * (1 - p) ** (n - k)
            assert s.incomplete_beta(n - k, k + 1, 1 - p) == pytest.approx(total, abs=1e-10)


def test_intervals_cover_as_often_as_they_say() -> None:
    rng = random.Random(3)
    mean_hits = p90_hits = 0
    for _ in range(400):
        sample = [rng.expovariate(1) for _ in range(60)]
        low, high = s.mean_interval(sample) or [0, 0]
        mean_hits += low <= 1 <= high  # type: ignore[operator]
        low, high = s.quantile_interval(sorted(sample), 90)
        p90_hits += low is not None and high is not None and low <= math.log(10) <= high
    assert 0.90 < mean_hits / 400 < 0.98  # a skewed sample of 60 costs the t interval a little
    assert 0.93 < p90_hits / 400 <= 0.995  # exact ranks are a little wide


def test_clustered_intervals_cover_where_naive_ones_do_not() -> None:
    """Gaps of one request share a level; only an interval that knows the requests holds the true mean 95 % of times."""
    rng = random.Random(5)
    naive = clustered = share = 0
    for _ in range(200):
        values: list[float] = []
        for _ in range(30):
            level = rng.gauss(10, 2)
            values += [level + rng.gauss(0, 0.5) for _ in range(20)]
        low, high = s.mean_interval(values) or [0, 0]
        naive += low <= 10 <= high  # type: ignore[operator]
        low, high = s.mean_interval(values, [20] * 30) or [0, 0]
        clustered += low <= 10 <= high  # type: ignore[operator]
        low, high = s.clustered_quantile_interval(values, sorted(values), [20] * 30, 50)
        share += low is not None and high is not None and low <= 10 <= high
    assert naive / 200 < 0.5
    assert clustered / 200 > 0.9
    assert share / 200 > 0.88


def test_p99_of_ten_has_no_upper_bound() -> None:
    low, high = s.quantile_interval([float(i) for i in range(10)], 99)
    assert low is not None
    assert high is None
    assert s.quantile_interval([float(i) for i in range(2000)], 99)[1] is not None


def test_wilson_interval() -> None:
    assert s.wilson_interval(0, 0) == (0.0, 1.0)
    low, high = s.wilson_interval(10, 10)
    assert low == pytest.approx(0.7225, abs=1e-4)
    assert high == pytest.approx(1.0)
    low, high = s.wilson_interval(95, 100)
    assert (low, high) == (pytest.approx(0.8882, abs=1e-4), pytest.approx(0.9785, abs=1e-4))


def test_slope_interval_finds_a_trend() -> None:
    rng = random.Random(7)
    xs = [float(i) for i in range(50)]
    rising = s.slope_interval(xs, [2 * x + rng.gauss(0, 5) for x in xs])
    flat = s.slope_interval(xs, [rng.gauss(0, 5) for _ in xs])
    assert rising is not None
    assert rising[0] > 1.8
    assert rising[0] < 2 < rising[1]
    assert flat is not None
    assert flat[0] < 0 < flat[1]
    assert s.slope_interval([1.0, 1.0, 1.0], [1, 2, 3]) is None


def test_poisson_arrivals_are_poisson() -> None:
    """Counts in windows have a variance equal to their mean (dispersion 1), and gaps repeat nowhere."""
    times = list(itertools.takewhile(lambda t: t < 4000, poisson_arrivals(5.0, seed=1)))
    counts = [0] * 400
    for t in times:
        counts[int(t / 10)] += 1
    assert stdlib.fmean(counts) == pytest.approx(50, rel=0.03)
    assert stdlib.variance(counts) / stdlib.fmean(counts) == pytest.approx(1, abs=0.25)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert stdlib.stdev(gaps) == pytest.approx(stdlib.fmean(gaps), rel=0.05)  # exponential: equal
    assert len({round(g, 9) for g in gaps}) > 0.999 * len(gaps)
    assert list(itertools.islice(poisson_arrivals(5.0, 1), 5)) == times[:5]
    assert list(itertools.islice(poisson_arrivals(5.0, 2), 5)) != times[:5]


def test_constant_arrivals() -> None:
    assert list(itertools.islice(constant_arrivals(4), 4)) == [0, 0.25, 0.5, 0.75]


def test_sweep_rates() -> None:
    assert sweep_rates(2, 10, 4) == [4, 6, 8, 10]
    assert sweep_rates(5, 5, 2) == [2.5, 5], "where batching gains nothing, the rates lie below the ceiling"
