"""The sliding maximum against one that keeps everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine import recent_peak
from octavo.engine.recent_peak import RecentPeak

MOMENTS = st.lists(st.tuples(st.floats(0, 2), st.integers(0, 9)), max_size=30)


@given(MOMENTS, st.floats(0, 2))
def test_it_is_the_maximum_of_the_window(moments, after):
    clock = [0.0]
    peak, told = RecentPeak(0.5), []
    original, recent_peak.time = recent_peak.time, type("Clock", (), {"monotonic": staticmethod(lambda: clock[0])})
    try:
        for pause, value in moments:
            clock[0] += pause
            peak.add(value)
            told.append((clock[0], value))
        clock[0] += after
        within = [value for moment, value in told if moment >= clock[0] - 0.5]
        assert peak.most(default=-1.0) == max(within, default=-1.0)
    finally:
        recent_peak.time = original
