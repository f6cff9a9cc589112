"""benchmark.json, benchmark.csv (one row a run) and benchmark.html (one file, nothing fetched)."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from importlib import resources
from pathlib import Path
from typing import Any

from octavo.bench.console import number, verdict_lines
from octavo.bench.svg import Chart, Series

DEFINITIONS = {
    "ttft_ms": (
        "Time to first token: from the moment the request was due to the arrival of the first chunk that brings a"
        " token. In open loops the due time is the schedule's, in closed loops the moment the stream became free;"
        " connecting is included. Tools that start the clock when the request is really sent show less once the "
        "client or server falls behind."
    ),
    "itl_ms": (
        "Inter-token latency: every gap between two successive chunks that bring tokens, all requests pooled, the"
        " first token's wait excluded. Tools that keep one mean gap a request cannot show a stall inside it; "
        "their p99 is lower."
    ),
    "tpot_ms": (
        "Time per output token: (last token - first token) / (tokens - 1) of each request, tokens as `usage` "
        "counts them. GuideLLM's figure of this name divides the whole latency by all tokens, first one included,"
        " and is higher."
    ),
    "request_latency_ms": ("From the due time to the end of the answer (the last byte of the stream)."),
    "queue_delay_ms": (
        "How late the client sent the request after it was due: its own lag, and waiting for --max-concurrency."
    ),
    "output_tokens_per_second": ("Output tokens of completed requests by `usage`, over the run's duration."),
    "duration_s": (
        "From the due time of the first counted request to the end of the last one, with the drain at the end."
    ),
    "percentiles": ("Linear interpolation between order statistics, over completed requests alone."),
    "intervals": (
        "95 %: of means by Student's t, of p99 by order statistics (null where the sample is too small for a "
        "bound); for gaps the requests are the independent units. They speak of this run, not of another day."
    ),
    "attainment": (
        "Share of requests that hold every limit (for ITL: the mean of the request's own gaps). Failed requests "
        "do not hold it; one cut off at the end counts only when it had already broken a limit. Interval: Wilson."
    ),
    "goodput": ("Requests a second that hold every limit."),
    "met": (
        "Attainment reaches the stated percentile, and that percentile of all real gaps is within the ITL limit "
        "as well."
    ),
}
TITLES = {"ttft_ms": "Time to first token", "itl_ms": "Gaps between tokens", "request_latency_ms": "Whole request"}
_SUMMARY_COLUMNS = ("mean", "std", "min", "p50", "p90", "p95", "p99", "max", "count")


def write(report: dict[str, Any], output_dir: Path) -> list[Path]:
    """Write the three files whole or not at all, each by a rename. Returns their paths."""
    contents = {
        "benchmark.json": json.dumps(report, indent=1) + "\n",
        "benchmark.csv": csv_text(report),
        "benchmark.html": html_text(report),
    }
    paths: list[Path] = []
    for name, text in contents.items():
        path = output_dir / name
        partial = output_dir / f".{name}.{os.getpid()}.part"
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
        paths.append(path)
    return paths


def csv_text(report: dict[str, Any]) -> str:
    """One header line, one line a run."""
    rows = [_csv_row(report, run) for run in report["runs"]]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else ["profile"])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _csv_row(report: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"label": report["label"], "model": report["environment"].get("model")}
    keys = ("profile", "rate", "streams", "realised_rate", "duration_s", "requests_per_second")
    row |= {key: run[key] for key in (*keys, "output_tokens_per_second", "prompt_tokens_per_second", "overloaded")}
    row |= run["requests"]
    for name, summary in run["metrics"].items():
        row |= {f"{name}_{column}": summary[column] for column in _SUMMARY_COLUMNS}
        for column in ("mean_ci95", "p99_ci95"):
            low, high = summary[column] or (None, None)
            row |= {f"{name}_{column}_low": low, f"{name}_{column}_high": high}
    row |= {f"slo_{key}": run["slo"][key] for key in ("attainment", "goodput", "met")}
    return row


def html_text(report: dict[str, Any]) -> str:
    """The page: verdict, table, plots, warnings, definitions. Needs no network and no script."""
    from jinja2 import Environment

    source = resources.files("octavo.bench").joinpath("report.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return template.render(
        report=report,
        charts=[(title, chart.render()) for title, chart in charts(report)],
        verdict=verdict_lines((report["slo"] or {}).get("highest_load")),
        warnings=[(run_name(run), run["warnings"]) for run in report["runs"] if run["warnings"]],
        number=number,
        run_name=run_name,
        interval=_interval,
    )


def run_name(run: dict[str, Any]) -> str:
    """Such as "constant 4/s" or "concurrent 8"."""
    if run["profile"] == "concurrent":
        return f"concurrent {run['streams']}"
    return run["profile"] if run["rate"] is None else f"{run['profile']} {run['rate']:.3g}/s"


def charts(report: dict[str, Any]) -> list[tuple[str, Chart]]:
    """Latency against load where there are several loads, distributions, and the timeline of the last run."""
    runs = [r for r in report["runs"] if r["requests"]["completed"]]
    if not runs:
        return []
    limits = {k: v for k, v in (report["slo"] or {}).items() if k.endswith("_ms") and v is not None}
    found: list[tuple[str, Chart]] = []
    if len(runs) > 1:
        found += _against_load(runs, limits)
    shown = _spread(runs, 6)
    for metric, title in TITLES.items():
        found.append((title, _distribution(shown, metric, title, limits.get(metric))))
    found.append(("Requests over time, " + run_name(runs[-1]), _timeline(runs[-1])))
    for run in reversed(runs):
        if run.get("server_metrics"):
            found.append(("The server meanwhile, " + run_name(run), _server(run)))
            break
    return found


def _against_load(runs: list[dict[str, Any]], limits: dict[str, float]) -> list[tuple[str, Chart]]:
    if all(r["profile"] == "concurrent" for r in runs):
        label, placed = "streams", [(r["streams"], r) for r in runs]
    else:  # what was offered; a closed loop offers what is served, and the throughput run no rate at all
        label = "requests offered a second"
        placed = [(r["rate"] or r["requests_per_second"], r) for r in runs if r["profile"] != "throughput"]
    placed.sort(key=lambda pair: pair[0])
    charts_found: list[tuple[str, Chart]] = []
    for metric, title in TITLES.items():
        lines = [
            Series(q, [(x, r["metrics"][metric][q]) for x, r in placed], colour=i)
            for i, q in enumerate(("p50", "p95", "p99"))
        ]
        limit = (limits[metric], f"objective {limits[metric]:g} ms") if metric in limits else None
        values = [y for line in lines for _, y in line.points if y]
        is_log = bool(values) and max(values) > 30 * min(values)
        charts_found.append((f"{title} against load", Chart(title, label, "ms", lines, is_log_y=is_log, limit=limit)))
    output = [Series("output tokens/s", [(x, r["output_tokens_per_second"]) for x, r in placed])]
    charts_found.append(("Output against load", Chart("Output", label, "tokens a second", output)))
    return charts_found


def _distribution(runs: list[dict[str, Any]], metric: str, title: str, limit: float | None) -> Chart:
    lines: list[Series] = []
    for i, run in enumerate(runs):
        points = run["distributions"][metric]
        if points:
            lines.append(Series(run_name(run), list(zip(points["value"], points["percent"], strict=True)), colour=i))
    values = [x for line in lines for x, _ in line.points if x > 0]
    is_log = bool(values) and max(values) > 30 * min(values)
    vertical = (limit, f"objective {limit:g} ms") if limit is not None else None
    of_what = "% of gaps" if metric == "itl_ms" else "% of requests"
    return Chart(title, "ms", of_what, lines, is_log_x=is_log, vertical=vertical)


def _timeline(run: dict[str, Any]) -> Chart:
    rows = [row for row in run["timeline"] if row[3] == "completed"]
    failed = [(row[0], row[2]) for row in run["timeline"] if row[3] != "completed"]
    series = [
        Series("first token", [(row[0], row[1]) for row in rows], colour=0, is_scatter=True),
        Series("whole request", [(row[0], row[2]) for row in rows], colour=1, is_scatter=True),
    ]
    if failed:
        series.append(Series("failed or cut off", failed, colour=2, is_scatter=True))
    return Chart("Requests over time", "seconds since the run began (due time)", "ms", series)


def _server(run: dict[str, Any]) -> Chart:
    data = run["server_metrics"]["series"]
    names = {"running": "running", "waiting": "waiting", "kv_cache_usage": "KV cache used, %"}
    series = []
    for i, (key, name) in enumerate(names.items()):
        if key in data:
            scale = 100 if key == "kv_cache_usage" else 1
            points = [(t, None if v is None else v * scale) for t, v in zip(data["time_s"], data[key], strict=True)]
            series.append(Series(name, [(t, v) for t, v in points if t >= 0], colour=i, is_dashed=i == 2))
    return Chart("Server", "seconds since the run began", "requests, %", series)


def _spread(runs: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """At most `count` runs, evenly chosen, first and last included."""
    if len(runs) <= count:
        return runs
    return [runs[math.floor(i * (len(runs) - 1) / (count - 1))] for i in range(count)]


def _interval(bounds: list[float | None] | None) -> str:
    if bounds is None:
        return "-"
    low, high = bounds
    return f"{number(low) if low is not None else '…'} to {number(high) if high is not None else '…'}"
