"""report.html: one self-contained page from the content of report.json."""

from __future__ import annotations

import itertools
from typing import Any

from octavo.decide.plots import COLORS, Series, interval_plot, line_plot, stacked_bars

Result = dict[str, Any]
MB = 1e6


def render(result: Result) -> str:
    """The page as HTML, with styles and plots inside; nothing is fetched when it is opened."""
    import jinja2

    loader = jinja2.PackageLoader("octavo.decide", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"mb": lambda v: f"{v / MB:,.1f} MB", "ms": lambda v: "-" if v is None else f"{v:,.1f}"}
    environment.filters["percent"] = lambda v: f"{v:.1%}"
    return environment.get_template("report.html").render(r=result, plots=_plots(result))


def _plots(result: Result) -> dict[str, Any]:
    size, quality = result["size"], result["perplexity"]
    bars = [(name, {part: count / MB for part, count in size[name]["parts"].items()}) for name in ("before", "after")]
    rows = [(name, quality[name]["perplexity"], *quality[name]["ci95"]) for name in ("before", "after")]
    return {
        "size": stacked_bars(bars, "MB"),
        "perplexity": interval_plot(rows, "perplexity (lower is better), with its 95 % interval"),
        "running": _gauge_plot(result["prefix"], "num_requests_running", "requests running"),
        "hits": _gauge_plot(result["prefix"], "prefix_cache_hits_total", "prompt tokens found cached"),
        "ttft": _cdf_plot(result["loads"], "ttft_ms", "time to first token, ms", result["slo"]["limits"]),
        "itl": _cdf_plot(result["loads"], "itl_ms", "gap between two tokens, ms", result["slo"]["limits"]),
        "kv": _kv_bars(result["kv"]),
    }


def _gauge_plot(rounds: list[dict[str, Any]], name: str, label: str) -> str:
    series = []
    for color, entry in zip(itertools.cycle(COLORS), rounds, strict=False):
        base = entry["before"].get(name, 0.0)
        points = [(s["seconds"], s["values"][name] - base) for s in entry["samples"]]
        series.append(Series(entry["name"], points or [(0.0, 0.0)], is_step=True, color=color))
    return line_plot(series, "seconds since the questions were sent", label)


def _cdf_plot(loads: list[dict[str, Any]], metric: str, label: str, limits: dict[str, float]) -> str:
    series = []
    for color, load in zip(itertools.cycle(COLORS), loads, strict=False):
        quantiles = load["distributions"][metric]
        if quantiles is not None:
            pairs = zip(quantiles["percent"], quantiles["value"], strict=True)
            points = [(value, percent) for percent, value in pairs if percent >= 1]  # a stray 0 would stretch the axis
            series.append(Series(load["title"], points, color=color))
    if not series:
        return ""
    limit = (f"limit {limits[metric]:g} ms", limits[metric]) if metric in limits else None
    return line_plot(series, label, "percent below", limit, log_x=True)


def _kv_bars(kv: dict[str, Any]) -> str:
    paged = {"held by paging": kv["paged_bytes"] / MB}
    reserved = {"held by paging": kv["paged_bytes"] / MB}
    reserved["reserved and empty"] = (kv["contiguous_bytes"] - kv["paged_bytes"]) / MB
    return stacked_bars([("paged", paged), ("contiguous", reserved)], "MB")
