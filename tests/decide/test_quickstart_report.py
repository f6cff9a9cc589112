"""The page from a result: whole, escaped, and without anything to fetch."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from octavo.decide.plots import Series, interval_plot, line_plot, stacked_bars
from octavo.decide.report import render


class _Outline(HTMLParser):
    """Checks that tags are closed in order, and keeps the text and the tags seen."""

    void = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def outline(page: str) -> _Outline:
    parser = _Outline()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_the_page_holds_every_section_and_all_plots(recorded_result):
    found = outline(render(json.loads(json.dumps(recorded_result))))
    text = " ".join(" ".join(found.text).split())
    for words in (
        "Deploy: every objective holds.", "58 % less rather than 75 %", "20.00 before", "21.00 after", "+5.0 %",
        "100 to 2,100", "16 to 1,616", "80.0%", "prefix_cache_hits_total", "concurrent, 4 streams", "87.6",
        "24 blocks of 16 tokens", "8.8 MB", "755.0 MB", "octavo serve out/model", "limit 200 ms",
        "a warning of the load",
    ):  # fmt: skip
        assert words in text, words
    assert found.seen.count("svg") == 7


def test_the_page_is_self_contained_and_escaped(recorded_result):
    page = render(recorded_result)
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|<script|https?://", page)
    assert "a &lt;fast&gt; CPU" in page
    assert "a &lt;note&gt;" in page
    assert "<fast>" not in page


def test_a_missed_objective_is_shown_as_such(recorded_result):
    result = recorded_result
    result["verdict"] |= {
        "is_deploy": False,
        "headline": "Do not deploy: quality missed.",
        "advice": ["quality: try W8A16."],
    }
    result["verdict"]["checks"][1]["is_met"] = False
    result["loads"][0]["slo"] |= {"met": False, "attainment": 0.25}
    page = render(result)
    assert "Do not deploy: quality missed." in page
    assert "quality: try W8A16." in page
    assert page.count(">missed<") == 2
    assert "25.0%" in page


def test_a_load_without_gaps_still_renders(recorded_result):
    result = recorded_result
    for load in result["loads"]:
        load["distributions"] = {**load["distributions"], "itl_ms": None}
        load["metrics"] = {**load["metrics"], "itl_ms": {"p50": None, "p99": None}}
    assert outline(render(result)).seen.count("svg") == 6


def test_bars_are_in_proportion():
    page = stacked_bars([("a", {"x": 30.0, "y": 10.0}), ("b", {"x": 20.0})], "MB")
    widths = [float(w) for w in re.findall(r'<rect x="[\d.]+" y="\d+" width="([\d.]+)" height="30"', page)]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
    assert widths[2] == pytest.approx(2 * widths[1], rel=0.01)
    assert "40.0 MB" in page


def test_a_step_series_holds_its_value():
    page = line_plot([Series("s", [(0.0, 0.0), (1.0, 1.0)], is_step=True)], "x", "y")
    path = re.search(r'<path d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', page)
    x0, y0, x1, y1, x2, y2 = map(float, path.groups())
    assert x0 < x1 == x2
    assert y0 == y1 > y2


@pytest.mark.parametrize("log_x", [False, True])
def test_limit_and_points_stand_where_their_values_are(log_x):
    page = line_plot([Series("s", [(1.0, 0.0), (100.0, 1.0)])], "x", "y", limit=("limit", 10.0), log_x=log_x)
    start, end = (float(v) for v in re.search(r'd="M([\d.]+) [\d.]+L([\d.]+)', page).groups())
    limit = float(re.search(r'<line x1="([\d.]+)" x2="\1"[^>]*class="limit"', page)[1])
    share = (limit - start) / (end - start)
    assert share == pytest.approx(0.5 if log_x else 9 / 99, abs=0.01)


def test_flat_values_do_not_divide_by_zero():
    assert "<svg" in line_plot([Series("s", [(0.0, 0.0)])], "x", "y")
    assert "<svg" in interval_plot([("a", 3.0, 3.0, 3.0)], "x")
