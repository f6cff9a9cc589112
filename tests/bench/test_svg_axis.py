"""The axis that the charts of bench and of the quickstart share."""

from __future__ import annotations

import random

import pytest

from octavo.bench.svg_axis import Axis


@pytest.mark.parametrize("is_log", [False, True])
def test_ends_meet_the_pixels_and_order_is_kept(is_log: bool) -> None:
    axis = Axis(0.5, 80.0, 300.0, 20.0, is_log)
    assert axis.place(0.5) == pytest.approx(300)
    assert axis.place(80.0) == pytest.approx(20)
    places = [axis.place(value) for value in (0.5, 1, 7, 79, 80)]
    assert places == sorted(places, reverse=True)


def test_a_logarithmic_axis_spaces_ratios_evenly() -> None:
    axis = Axis(1.0, 100.0, 0.0, 200.0, is_log=True)
    assert axis.place(10.0) == pytest.approx(100)
    assert axis.place(0.0) == 0.0
    assert axis.ticks(7) == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    assert Axis(1.0, 1000.0, 0.0, 1.0, is_log=True).ticks(7) == [1.0, 10.0, 100.0, 1000.0]


def test_ticks_are_round_inside_the_range_and_about_as_many_as_asked() -> None:
    draw = random.Random(5)
    for _ in range(200):
        low = draw.choice([0.0, draw.uniform(-50, 50)])
        axis = Axis(low, low + 10 ** draw.uniform(-3, 5), 0.0, 1.0)
        ticks = axis.ticks(5)
        step = ticks[1] - ticks[0]
        assert f"{step:.3e}"[:5] in ("1.000", "2.000", "5.000")
        assert 2 <= len(ticks) <= 6
        assert all(axis.low - step * 1e-6 <= tick <= axis.high + step * 1e-6 for tick in ticks)


def test_an_axis_without_extent_still_places_and_ticks() -> None:
    axis = Axis(3.0, 3.0, 0.0, 10.0)
    assert axis.place(3.0) == 0.0
    assert axis.ticks(5) == [3.0]
