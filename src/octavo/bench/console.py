"""What a person sees while a load runs: the objective, a progress bar, a line a run, a table at the end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from octavo.bench.config import BenchConfig
from octavo.bench.load import Limits
from octavo.bench.profiles import RunPlan
from octavo.bench.records import RequestRecord
from octavo.bench.slo import Slo
from octavo.progress import Progress

LEGEND = (
    "objective: the share of requests that hold it. '?': too few requests to be sure. 'gaps': the percentile of all "
    "gaps between tokens is over the limit."
)


class Screen:
    """Prints results on stdout, notes and progress on stderr; nothing when `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self._out = Console(quiet=quiet, highlight=False)
        if not self._out.is_terminal:
            self._out = Console(quiet=quiet, highlight=False, width=max(150, self._out.width))
        self._notes = Console(quiet=quiet, stderr=True, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """A note on stderr."""
        self._notes.print(text, markup=False)

    def start(self, config: BenchConfig, slo: Slo | None, workload: str, notes: list[str]) -> None:
        """State what is about to happen; the objective comes before any figure."""
        self.say(f"loading {config.base_url()} ({config.request_format}), prompts: {workload}")
        if slo is not None:
            self.say(f"objective: {slo.describe()}")
        for note in notes:
            self.say(f"note: {note}")

    @contextlib.contextmanager
    def progress(self, plan: RunPlan, limits: Limits) -> Iterator[Callable[[RequestRecord], None]]:
        """A bar by requests or by seconds, whichever ends the run; only on a terminal."""
        total = limits.max_requests or limits.max_seconds
        unit = "requests" if limits.max_requests else "s"
        started = perf_counter()
        counts = {"completed": 0, "failed": 0}
        enabled = not self._notes.quiet
        with Progress(total, plan.title, unit=unit, enabled=enabled, from_caller=True) as bar:

            def on_finished(record: RequestRecord) -> None:
                counts[record.status] = counts.get(record.status, 0) + 1
                seconds = min(perf_counter() - started, total or math.inf)
                done = sum(counts.values()) if limits.max_requests else seconds
                bar.update(done, note=f"{counts['completed']} done, {counts['failed']} failed")

            yield on_finished

    def run_done(self, plan: RunPlan, entry: dict[str, Any]) -> None:
        """The warnings of a finished run."""
        for warning in entry["warnings"]:
            self.say(f"{plan.title}: {warning}")

    def results(self, report: dict[str, Any], files: list[Path]) -> None:
        """The table of all runs, the verdict, and where the files are."""
        self._out.print(_table(report))
        slo = report["slo"]
        if slo is not None:
            self._out.print(f"objective {slo['text']}", markup=False)
            for line in verdict_lines(slo["highest_load"]):
                self._out.print(line, markup=False)
        self.say("written: " + ", ".join(str(path) for path in files))


def verdict_lines(highest: dict[str, Any] | None) -> list[str]:
    """What the runs say about the highest load that holds the objective."""
    if not highest:
        return []
    lines: list[str] = []
    for key in ("rate", "streams"):
        if key in highest:
            tried = highest[f"{key}_tried_up_to"]
            if highest[key] is None:
                lines.append(f"no measured load holds it (tried up to {_load(key, tried)})")
            elif highest[key] == tried:
                lines.append(f"holds it up to {_load(key, tried)}, the highest that was tried")
            else:
                lines.append(f"holds it up to {_load(key, highest[key])} (tried up to {tried:.4g})")
    return lines


def _load(key: str, value: float) -> str:
    if key == "rate":
        return f"{value:.4g} requests/s"
    return f"{value:.4g} streams at once" if value != 1 else "one request at a time"


def _table(report: dict[str, Any]) -> Table:
    caption = None if report["slo"] is None else LEGEND
    table = Table(box=box.SIMPLE_HEAD, title=report["label"], title_justify="left", caption=caption,
                  caption_justify="left")  # fmt: skip
    for name in ("run", "rate", "ok/fail/cut", "req/s", "out tok/s"):
        table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
    for name in ("TTFT p50", "p99", "ITL p50", "p99", "latency p50", "p99 ms"):
        table.add_column(name, justify="right")
    table.add_column("objective", no_wrap=True)
    for run in report["runs"]:
        counts, metrics = run["requests"], run["metrics"]
        table.add_row(
            run["profile"] + (" (overloaded)" if run["overloaded"] else ""),
            "" if run["rate"] is None else f"{run['rate']:.3g}",
            f"{counts['completed']}/{counts['failed']}/{counts['cancelled']}",
            f"{run['requests_per_second']:.2f}",
            f"{run['output_tokens_per_second']:.1f}",
            *(number(metrics[m][q]) for m in ("ttft_ms", "itl_ms", "request_latency_ms") for q in ("p50", "p99")),
            _verdict(run["slo"]),
        )
    return table


def _verdict(slo: dict[str, Any]) -> str:
    if slo["met"] is None:
        return ""
    gaps = slo["limits"].get("itl_ms", {"met": True, "observed": None})
    if gaps["observed"] is not None and not gaps["met"]:
        return f"missed {100 * slo['attainment']:.1f} %, gaps"
    doubt = "" if slo["decided"] else "?"
    return f"{'met' if slo['met'] else 'missed'}{doubt} {100 * slo['attainment']:.1f} %"


def number(value: float | None) -> str:
    """Milliseconds for people: three figures or so, a dash for none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
