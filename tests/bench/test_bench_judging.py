"""Objectives, overload and warm-up on records with known times."""

from __future__ import annotations

from array import array

import pytest

from octavo.bench import profiles, slo
from octavo.bench.analysis import detect_overload, measured_window, run_report
from octavo.bench.load import Limits, LoadResult
from octavo.bench.records import RequestRecord
from octavo.errors import UserError

MS = 1_000_000
NO_LIMITS = Limits(None, None, 60, None)


def record(index: int, due_ms: float, ttft: float, gaps: list[float], status: str = "completed") -> RequestRecord:
    due = int(due_ms * MS) + MS
    times = [due + int(ttft * MS)]
    for gap in gaps:
        times.append(times[-1] + int(gap * MS))
    result = RequestRecord(index, due, sent_ns=due, end_ns=times[-1], status=status)
    result.token_ns, result.output_tokens, result.has_usage = array("q", times), len(times), True
    if status != "completed":
        result.error_kind, result.error = "timeout", "too slow"
    return result


def load_of(records: list[RequestRecord]) -> LoadResult:
    last = max(r.scheduled_ns for r in records)
    return LoadResult(records, start_ns=MS, arrivals_end_ns=last, end_ns=max(r.end_ns for r in records))


def report(records: list[RequestRecord], objective: str) -> dict:
    return run_report(profiles.constant(10), load_of(records), NO_LIMITS, slo.Slo.parse(objective))


def test_presets_and_limits() -> None:
    chat, rag = slo.Slo.parse("chat"), slo.Slo.parse("rag")
    assert (chat.limits, chat.percentile) == ({"ttft_ms": 200, "itl_ms": 50}, 99)
    assert rag.limits == {"ttft_ms": 300, "itl_ms": 100, "request_latency_ms": 3000}
    custom = slo.Slo.parse("ttft_ms=200, itl_ms=50,request_latency_ms=3000,percentile=95")
    assert custom.limits == {"ttft_ms": 200, "itl_ms": 50, "request_latency_ms": 3000}
    assert custom.percentile == 95


@pytest.mark.parametrize("text", ["fast", "ttft_ms=-1", "ttft_ms=x", "percentile=99", "ttft_ms=1,percentile=101", ""])
def test_bad_objectives_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--slo"):
        slo.Slo.parse(text)


def test_attainment_goodput_and_limits() -> None:
    good = [record(i, 100 * i, 100, [20, 20]) for i in range(7)]
    late = record(7, 700, 250, [20, 20])
    slow = record(8, 800, 100, [20, 100])  # its mean gap is 60
    failed = record(9, 900, 100, [], status="failed")
    verdict = report([*good, late, slow, failed], "ttft_ms=200,itl_ms=50,percentile=70")["slo"]
    assert verdict["attainment"] == pytest.approx(0.7)
    assert verdict["met"] is True
    window = (
        slow.scheduled_ns + 220 * MS - good[0].scheduled_ns
    ) / 1e9  # the failed one ended at 1000, the slow at 1020
    assert verdict["goodput"] == pytest.approx(7 / window)
    assert verdict["limits"]["itl_ms"]["observed"] == pytest.approx(20)
    assert verdict["decided"] is False
    strict = report([*good, late, slow, failed], "ttft_ms=200,itl_ms=50,percentile=80")["slo"]
    assert strict["met"] is False


def test_stalls_inside_quick_requests_count() -> None:
    """Each request's mean gap holds the limit, but more than 1 % of the gaps do not."""
    records = [record(i, 100 * i, 50, [10] * 18 + [150]) for i in range(20)]
    verdict = report(records, "itl_ms=50,percentile=99")["slo"]
    assert verdict["attainment"] == 1.0
    assert verdict["met"] is False
    assert verdict["limits"]["itl_ms"]["observed"] == pytest.approx(150)


def test_answers_of_one_token_hold_an_itl_limit() -> None:
    assert report([record(i, i, 5, []) for i in range(3)], "itl_ms=50")["slo"]["met"] is True


def test_cut_off_requests_count_once_they_broke_a_limit() -> None:
    objective = slo.Slo.parse("ttft_ms=100")
    fine, waiting, hopeless = (record(i, 0, 50, [10], status="cancelled") for i in range(3))
    waiting.token_ns = array("q")
    waiting.end_ns = waiting.scheduled_ns + 60 * MS
    hopeless.token_ns = array("q")
    hopeless.end_ns = hopeless.scheduled_ns + 160 * MS
    assert [objective.holds(r) for r in (fine, waiting, hopeless)] == [None, None, False]


def test_requests_that_a_verdict_takes() -> None:
    chat = slo.Slo.parse("chat")
    needed = slo.requests_to_decide(chat)
    assert needed is not None
    for count, decided in ((needed, True), (needed - 1, False)):
        records = [record(i, 10 * i, 10, [5]) for i in range(count)]
        assert report(records, "chat")["slo"]["decided"] is decided
    assert slo.requests_to_decide(slo.Slo.parse("ttft_ms=1,percentile=100")) is None


def test_highest_rate_needs_every_lower_one() -> None:
    def run(profile: str, rate: float | None, streams: int | None, met: bool) -> dict:
        return {"profile": profile, "rate": rate, "streams": streams, "slo": {"met": met}}

    runs = [run("constant", r, None, met) for r, met in ((4, True), (1, True), (2, True), (8, False), (16, True))]
    assert slo.highest_holding(runs) == {"rate": 4, "rate_tried_up_to": 16}
    streams = [run("concurrent", n, n, met) for n, met in ((1, True), (8, False))]
    assert slo.highest_holding(streams) == {"streams": 1, "streams_tried_up_to": 8}
    assert slo.highest_holding([run("constant", 1, None, False)]) == {"rate": None, "rate_tried_up_to": 1}


def test_overload_is_seen_and_steady_load_is_not() -> None:
    plan = profiles.constant(10)
    # 10 a second come, 5 a second are served: request i ends at 200 (i + 1) ms
    queued = [record(i, 100 * i, 200 * (i + 1) - 100 * i - 50, [50]) for i in range(60)]
    overloaded, reason = detect_overload(plan, load_of(queued), queued)
    assert overloaded is True
    assert "rose from" in reason
    steady = [record(i, 100 * i, 50 + (i * 37) % 23, [50]) for i in range(60)]
    assert detect_overload(plan, load_of(steady), steady)[0] is False
    assert detect_overload(profiles.RunPlan("synchronous", streams=1), load_of(queued), queued)[0] is None
    assert detect_overload(plan, load_of(queued[:5]), queued[:5])[0] is False


def test_warmup_and_cooldown_leave_requests_out() -> None:
    records = [record(i, 100 * i, 500 if i < 2 else 10, [5]) for i in range(10)]
    load = load_of(records)
    by_requests = Limits(10, None, 60, None)
    for warmup, cooldown, expected in ((2, 0, range(2, 10)), (0.2, 0.1, range(2, 9)), (0, 3, range(7))):
        kept, start, _ = measured_window(load, by_requests, warmup, cooldown)
        assert [r.index for r in kept] == list(expected)
        assert start == kept[0].scheduled_ns
    by_time = Limits(None, 0.9, 60, None)
    kept, _, _ = measured_window(load, by_time, 0.25, 0)
    assert [r.index for r in kept] == list(range(3, 10))
    entry = run_report(profiles.constant(10), load, by_requests, None, warmup=2)
    assert entry["metrics"]["ttft_ms"]["max"] == pytest.approx(10)
    assert entry["requests_left_out"] == 2
    assert entry["slo"] == {"attainment": None, "goodput": None, "met": None}


def test_chunks_that_come_together_are_reported() -> None:
    bursts = [record(i, 100 * i, 10, [0.01, 40, 0.01, 40]) for i in range(4)]
    entry = report(bursts, "chat")
    assert entry["tokens"]["burst_share"] == pytest.approx(0.5)
    assert any("50 % of chunks came together" in w for w in entry["warnings"])
    assert not report([record(0, 0, 10, [20, 20])], "chat")["warnings"]
