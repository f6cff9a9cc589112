"""What the quickstart tells on the terminal while it runs, and how long each stage took."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from octavo import units
from octavo.decide.kv_memory import KVMemory
from octavo.decide.prefix_trial import Round
from octavo.decide.steps import Compression
from octavo.decide.verdict import Check, Verdict

MAX_WIDTH = 120


class Narrator:
    """Headlines and findings; `stages` collects names and seconds."""

    def __init__(self, num_stages: int) -> None:
        self._console = Console(highlight=False)
        self._num_stages = num_stages
        self.stages: list[dict[str, Any]] = []

    def head(self, text: str) -> None:
        """A line that stands out."""
        self._console.print(text, style="bold", markup=False)

    def say(self, text: str) -> None:
        """A finding, wrapped and indented under its stage."""
        width = max(60, min(self._console.width, MAX_WIDTH))
        first = 6 + len(text) - len(text.lstrip())
        lines = textwrap.fill(text.strip(), width, initial_indent=" " * first, subsequent_indent=" " * (first + 2))
        self._console.print(lines, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a stage and time it."""
        self.head(f"[{len(self.stages) + 1}/{self._num_stages}] {name}")
        begin = time.monotonic()
        yield
        self.stages.append({"name": name, "seconds": time.monotonic() - begin})

    def size(self, compression: Compression) -> None:
        size, summary = compression.size, compression.summary
        before, after = (units.size(size[when]["bytes"]) for when in ("before", "after"))
        self.say(f"{before} before, {after} after, in {summary['seconds']:.1f} s")
        for line in [size["note"], *size["explanation"]]:
            if line:
                self.say(line)
        worst = summary["worst_layer"]
        largest = f"largest {worst['error']:.4f} ({worst['name']})"
        self.say(f"relative error of the layers' outputs: mean {summary['mean_error']:.4f}, {largest}")

    def rounds(self, rounds: Sequence[Round]) -> None:
        queries, hits = "prefix_cache_queries_total", "prefix_cache_hits_total"
        for entry in rounds:
            self.say(
                f"{entry.name}: up to {entry.peak_running} running; {queries} {entry.before[queries]:,.0f} -> "
                f"{entry.after[queries]:,.0f}, {hits} {entry.before[hits]:,.0f} -> {entry.after[hits]:,.0f} "
                f"({entry.hit_rate:.0%} found); first token after {entry.mean_first_token_s:.2f} s"
            )

    def loads(self, loads: Sequence[dict[str, Any]]) -> None:
        for load in loads:
            metrics = load["metrics"]
            ttft, itl = metrics["ttft_ms"]["p99"], metrics["itl_ms"]["p99"]
            verdict = "met" if load["slo"]["met"] else "missed"
            self.say(
                f"{load['title']}: {load['requests']['completed']} requests, TTFT p99 {_ms(ttft)}, ITL p99 {_ms(itl)}, "
                f"{load['output_tokens_per_second']:.0f} output tokens/s; objective {verdict} "
                f"({load['slo']['attainment']:.1%} hold it)"
            )

    def kv(self, kv: KVMemory) -> None:
        paged, contiguous = units.size(kv.paged_bytes), units.size(kv.contiguous_bytes)
        self.say(
            f"KV memory with {kv.running} running: {paged} in {kv.blocks} blocks; contiguous reservations "
            f"of {kv.max_model_len:,} tokens would have locked {contiguous} ({kv.ratio:.0f} times as much)"
        )

    def verdict(self, verdict: Verdict, page: Path, seconds: float, next_command: str) -> None:
        style = "bold green" if verdict.is_deploy else "bold red"
        self._console.print(f"\n{verdict.headline}", style=style, markup=False)
        for check in verdict.checks:
            self.say(_check_line(check))
        for line in verdict.advice:
            self.say(line)
        self._console.print(f"\nreport: {page} ({seconds:.0f} s in all)", markup=False, soft_wrap=True)
        lead = "go on with" if verdict.is_deploy else "to find what would hold"
        self._console.print(f"{lead}: {next_command}", markup=False, soft_wrap=True)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _check_line(check: Check) -> str:
    note = f" ({check.note})" if check.note else ""
    return f"{'met   ' if check.is_met else 'missed'} {check.name}: {check.measured}{note}"
