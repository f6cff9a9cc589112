"""The three files: keys, rows, and a page that fetches nothing."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from mock_server import Behaviour, MockServer

from octavo.bench.config import BenchConfig
from octavo.bench.run import run
from octavo.bench.svg import Chart, Series

SUMMARY_KEYS = {"mean", "median", "std", "min", "max", "p50", "p90", "p95", "p99", "count", "mean_ci95", "p99_ci95"}
METRICS = {"ttft_ms", "itl_ms", "tpot_ms", "request_latency_ms", "queue_delay_ms"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Poisson load of two rates in which one request fails."""
    path = tmp_path_factory.mktemp("bench")

    def behave(body: dict[str, Any], index: int) -> Behaviour:
        return Behaviour(status=500) if index == 3 else Behaviour(ttft_s=0.005, itl_s=0.001)

    with MockServer(behave) as server:
        run(
            BenchConfig(
                target=server.url, profile="poisson", rate="50,100", max_requests=10, slo="rag", output_dir=str(path),
                data="prompt_tokens=4,output_tokens=3", label="<script>alert(1)</script>", scrape_interval=0.1,
            ),
            quiet=True,
        )  # fmt: skip
    return path


def test_json_has_the_promised_keys(folder: Path) -> None:
    report = json.loads((folder / "benchmark.json").read_text())
    assert {"runs", "environment", "command"} <= set(report)
    assert [r["rate"] for r in report["runs"]] == [50, 100]
    for entry in report["runs"]:
        assert {"profile", "rate", "duration_s", "requests", "metrics", "slo"} <= set(entry)
        assert set(entry["requests"]) == {"completed", "failed", "cancelled"}
        assert set(entry["metrics"]) == METRICS
        for summary in entry["metrics"].values():
            assert set(summary) == SUMMARY_KEYS
            assert summary["min"] <= summary["p50"] <= summary["p90"] <= summary["p99"] <= summary["max"]
            assert summary["mean_ci95"][0] <= summary["mean"] <= summary["mean_ci95"][1]
        assert entry["output_tokens_per_second"] > entry["requests_per_second"] > 0
        assert {"attainment", "goodput", "met"} <= set(entry["slo"])
        assert entry["realised_rate"] > 0
    assert report["runs"][0]["requests"] == {"completed": 9, "failed": 1, "cancelled": 0}
    assert report["environment"]["server_version"] == "mock-1"
    assert report["config"]["prompt_salt"], "the drawn salt is kept, so that the prompts can be sent again"


def test_json_is_strict(folder: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads((folder / "benchmark.json").read_text(), parse_constant=refuse)


def test_csv_has_one_row_a_run(folder: Path) -> None:
    report = json.loads((folder / "benchmark.json").read_text())
    with (folder / "benchmark.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    for row, entry in zip(rows, report["runs"], strict=True):
        assert float(row["rate"]) == entry["rate"]
        assert float(row["ttft_ms_p99"]) == entry["metrics"]["ttft_ms"]["p99"]
        assert int(row["failed"]) == entry["requests"]["failed"]
        assert row["slo_met"] == str(entry["slo"]["met"])


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "action", "data")]
        if tag not in ("meta", "line", "polyline", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "polyline", "circle"):
            assert self.open.pop() == tag, f"</{tag}> closes nothing"


def test_html_is_self_contained(folder: Path) -> None:
    text = (folder / "benchmark.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert "script" not in page.tags, "the label is text, not markup"
    assert not re.search(r"url\(|@import", text)
    assert page.tags.count("svg") == 9
    assert "prefers-color-scheme: dark" in text
    assert "NaN" not in text
    for word in ("attainment", "rag: time to first token", "poisson 50/s", "Why two tools disagree", "octavo bench"):
        assert word in text


def test_charts_place_values() -> None:
    svg = Chart("t", "x", "y", [Series("a", [(0, 0), (10, 5), (5, None)])], limit=(4, "limit")).render()
    places = re.findall(r'<circle class="dot c0" cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert len(places) == 2
    (x0, y0), (x1, y1) = ((float(a), float(b)) for a, b in places)
    assert x1 > x0
    assert y1 < y0, "larger values are higher up"
    limit = re.search(r'class="limit" x1="\d+" x2="\d+" y1="([\d.]+)"', svg)
    assert limit is not None
    assert float(limit[1]) == pytest.approx(y0 + (y1 - y0) * 4 / 5, abs=0.1)
    assert "nothing was measured" in Chart("t", "x", "y", [Series("a", [])]).render()


def test_log_axis_keeps_ratios() -> None:
    points = [(1.0, 1.0), (10.0, 2.0), (100.0, 3.0)]
    svg = Chart("t", "x", "y", [Series("a", points)], is_log_x=True).render()
    xs = [float(x) for x in re.findall(r'<circle class="dot c0" cx="([\d.]+)"', svg)]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
