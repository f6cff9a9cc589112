"""The quickstart's steps, each by the public call of the part that does it."""

from __future__ import annotations

import math
import platform
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.builtin_text import builtin_text
from octavo.decide.config import QuickstartConfig
from octavo.errors import UserError

PERPLEXITY_WINDOW = 512
SCRAPE_SECONDS = 0.1


@dataclass(frozen=True)
class Compression:
    """The checkpoint that was written, its size by part beside the original's, and what it took."""

    model_dir: Path
    size: dict[str, Any]
    summary: dict[str, Any]


def compare_perplexity(config: QuickstartConfig, before: str, after: str) -> dict[str, Any]:
    """Perplexity of both models on the same held-out windows, and the rise with its paired 95 % interval.

    Each window is a unit: tokens of one window depend on each other. The rise of the two models on the same windows varies
    far less than either value does, so its interval is taken from the differences window by window.
    """
    from octavo.bench.statistics import mean_interval

    first = _window_scores(before, config.perplexity_windows)
    second = _window_scores(after, config.perplexity_windows)
    result: dict[str, Any] = {"before": _perplexity(first), "after": _perplexity(second), "rise_ci95": None}
    differences = [b - a for a, b in zip(first["nll"], second["nll"], strict=True)]
    interval = mean_interval(differences)
    result["rise_percent"] = 100 * (math.exp(sum(differences) / len(differences)) - 1)
    if interval is not None:
        result["rise_ci95"] = [100 * (math.exp(bound) - 1) for bound in interval]
    return result


def _window_scores(model: str, windows: int) -> dict[str, Any]:
    """Mean negative log-likelihood of each held-out window under one model."""
    from octavo.engine.llm import LLM
    from octavo.evaluate.perplexity import measure

    begin = time.monotonic()
    scores, tokens = [], 0
    # A prefix hit would skip the very predictions that count.
    with LLM(model, max_model_len=PERPLEXITY_WINDOW, enable_prefix_caching=False) as llm:
        ids = llm.get_tokenizer().encode(builtin_text("heldout"))
        available = len(ids) // PERPLEXITY_WINDOW
        if available < windows:
            raise UserError(
                f"perplexity_windows is {windows}; the held-out text has {available} windows of {PERPLEXITY_WINDOW} tokens",
                param="perplexity_windows",
            )
        step = available // windows  # spread over the whole text, whose chapters differ
        for i in range(windows):
            start = i * step * PERPLEXITY_WINDOW
            window = ids[start : start + PERPLEXITY_WINDOW]
            found = measure(llm, window, window=PERPLEXITY_WINDOW, batch_size=1)
            scores.append(found.mean_nll)
            tokens += found.tokens
    return {"nll": scores, "tokens": tokens, "seconds": time.monotonic() - begin}


def _perplexity(scores: dict[str, Any]) -> dict[str, Any]:
    from octavo.bench.statistics import mean_interval

    nll = scores["nll"]
    value = math.exp(sum(nll) / len(nll))
    interval = mean_interval(nll)
    ends = [math.exp(bound) for bound in interval] if interval is not None else [value, value]
    facts = {"tokens": scores["tokens"], "windows": len(nll), "seconds": scores["seconds"]}
    return {"perplexity": value, "ci95": ends, **facts}


def load(config: QuickstartConfig, folder: Path, url: str, streams: int) -> dict[str, Any]:
    """One load as `octavo bench` runs and judges it; its files go to a folder of their own."""
    from octavo.bench.run import run

    settings = bench_settings(config, folder, url, streams)
    report = run(settings, quiet=True).runs[0]
    return {**report, "title": _load_title(streams), "command": settings.command()}


def bench_settings(config: QuickstartConfig, folder: Path, url: str, streams: int) -> Any:
    """The settings of a load with `streams` requests at a time."""
    from octavo.bench.config import BenchConfig
    from octavo.bench.slo import Slo, requests_to_decide

    enough = requests_to_decide(Slo.parse(config.slo))
    return BenchConfig(
        target=url,
        profile="synchronous" if streams == 1 else "concurrent",
        rate=None if streams == 1 else str(streams),
        max_requests=enough,  # more would not change the verdict
        max_seconds=config.load_seconds,
        data=f"prompt_tokens={config.prompt_tokens},output_tokens={config.output_tokens},samples=1000",
        slo=config.slo,
        output_dir=str(folder / ("bench-synchronous" if streams == 1 else f"bench-concurrent-{streams}")),
        scrape_interval=SCRAPE_SECONDS,
    )


def _load_title(streams: int) -> str:
    return "synchronous" if streams == 1 else f"concurrent, {streams} streams"


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
