"""What the table of a load says to a person."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.bench.console import Screen, verdict_lines

METRIC = {"p50": 10.0, "p99": 20.0}


def report(attainment: float, met: bool, decided: bool, itl_met: bool) -> dict[str, Any]:
    """A report of one run, with what the table reads."""
    limits = {"itl_ms": {"limit": 50.0, "observed": 20.0 if itl_met else 90.0, "met": itl_met}}
    run = {
        "profile": "concurrent",
        "rate": 3.0,
        "overloaded": False,
        "requests": {"completed": 16, "failed": 0, "cancelled": 0},
        "requests_per_second": 4.0,
        "output_tokens_per_second": 32.0,
        "metrics": dict.fromkeys(("ttft_ms", "itl_ms", "request_latency_ms"), METRIC),
        "slo": {"attainment": attainment, "met": met, "decided": decided, "limits": limits},
    }
    return {"label": "", "runs": [run], "slo": {"text": "custom: ...", "highest_load": None}}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (report(1.0, met=True, decided=True, itl_met=True), "met 100.0 %"),
        (report(1.0, met=True, decided=False, itl_met=True), "met? 100.0 %"),
        (report(0.5, met=False, decided=True, itl_met=True), "missed 50.0 %"),
        # Each request's mean gap holds, the pooled gaps do not: more requests would not change that.
        (report(1.0, met=False, decided=False, itl_met=False), "missed 100.0 %, gaps"),
    ],
)
def test_the_verdict_of_a_run_says_what_broke_it(
    found: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Screen().results(found, [])
    row = next(line for line in capsys.readouterr().out.splitlines() if "concurrent" in line)
    assert row.rstrip().endswith(f"  {said}")


def test_the_table_explains_its_marks_only_beside_an_objective(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(1.0, met=True, decided=True, itl_met=True)
    Screen().results(found, [])
    assert "'?': too few requests to be sure" in capsys.readouterr().out
    found["slo"] = None
    found["runs"][0]["slo"]["met"] = None
    Screen().results(found, [])
    assert "too few" not in capsys.readouterr().out


def test_the_highest_load_in_words() -> None:
    assert verdict_lines(None) == []
    one = {"streams": 1, "streams_tried_up_to": 1}
    assert verdict_lines(one) == ["holds it up to one request at a time, the highest that was tried"]
    assert verdict_lines({"streams": None, "streams_tried_up_to": 4}) == [
        "no measured load holds it (tried up to 4 streams at once)"
    ]
    assert verdict_lines({"rate": 1.5, "rate_tried_up_to": 3.0}) == ["holds it up to 1.5 requests/s (tried up to 3)"]
