"""The quickstart's steps, each by the public call of the part that does it."""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo import units
from octavo.builtin_text import builtin_text
from octavo.decide.config import QuickstartConfig
from octavo.errors import UserError

PERPLEXITY_WINDOW = 512


@dataclass(frozen=True)
class Compression:
    """The checkpoint that was written, its size by part beside the original's, and what it took."""

    model_dir: Path
    size: dict[str, Any]
    summary: dict[str, Any]


def compress(config: QuickstartConfig, folder: Path) -> Compression:
    """Compress as `octavo compress` does, calibrated on the built-in text."""
    from octavo.compress import run
    from octavo.compress.config import CompressConfig

    model_dir = folder / f"model-{config.scheme.lower()}"
    settings = CompressConfig(
        model=config.model,
        output_dir=str(model_dir),
        scheme=config.scheme,
        algorithm=config.algorithm,
        num_calibration_samples=config.num_calibration_samples,
        max_seq_length=config.max_seq_length,
    )
    report = run(settings, quiet=True).report
    worst = max(report["layers"], key=lambda layer: layer["error"])
    summary = {
        "seconds": report["seconds"]["total"],
        "calibration": report["calibration"],
        "mean_error": report["mean_error"],
        "worst_layer": {"name": worst["name"], "error": worst["error"]},
        "notes": report["notes"],
    }
    return Compression(model_dir, {**_sizes(report["size"]), "note": _size_note(config.model)}, summary)


def _size_note(model: str) -> str:
    """What `before` means when the original is itself a quantized file."""
    from octavo.checkpoint.source import resolve_model

    path = resolve_model(model)
    if path.suffix != ".gguf":
        return ""
    stored = units.size(path.stat().st_size)
    return (
        f"The original is a GGUF file of {stored}, quantized already; `before` is its weights as plain 16-bit numbers."
    )


def _sizes(size: dict[str, Any]) -> dict[str, Any]:
    """The size report with its parts as two columns."""
    result: dict[str, Any] = {"explanation": size["explanation"], "saved_percent": size["saved_percent"]}
    for when in ("before", "after"):
        parts = {part["part"]: part[f"{when}_bytes"] for part in size["parts"] if part[f"{when}_bytes"]}
        result[when] = {"bytes": size[f"{when}_bytes"], "parts": parts}
    return result


def compare_perplexity(windows: int, before: str, after: str) -> dict[str, Any]:
    """Perplexity of both models on the same held-out windows, and the rise with its paired 95 % interval.

    Each window is a unit: tokens of one window depend on each other. The rise between two models on the same windows
    varies far less than either value does, so its interval is taken from the differences window by window.
    """
    first = _window_scores(before, windows)
    second = _window_scores(after, windows)
    result: dict[str, Any] = {"before": _perplexity(first), "after": _perplexity(second), "rise_ci95": None}
    differences = [b - a for a, b in zip(first["nll"], second["nll"], strict=True)]
    mean, low, high = _mean_with_interval(differences)
    result["rise_percent"] = 100 * (math.exp(mean) - 1)
    if len(differences) > 1:
        result["rise_ci95"] = [100 * (math.exp(low) - 1), 100 * (math.exp(high) - 1)]
    return result


def _window_scores(model: str, windows: int) -> dict[str, Any]:
    """Mean negative log-likelihood of each held-out window under one model."""
    from octavo.engine.llm import LLM
    from octavo.evaluate.perplexity import measure

    begin = time.monotonic()
    scores, tokens = [], 0
    # A prefix hit would skip the very predictions that count.
    with LLM(model, max_model_len=PERPLEXITY_WINDOW, enable_prefix_caching=False) as llm:
        ids = llm.get_tokenizer().encode(builtin_text("heldout"), verbose=False)
        available = len(ids) // PERPLEXITY_WINDOW
        if available < windows:
            raise UserError(
                f"perplexity_windows is {windows}; the held-out text has {available} of {PERPLEXITY_WINDOW} tokens",
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
    mean, low, high = _mean_with_interval(scores["nll"])
    facts = {"tokens": scores["tokens"], "windows": len(scores["nll"]), "seconds": scores["seconds"]}
    return {"perplexity": math.exp(mean), "ci95": [math.exp(low), math.exp(high)], **facts}


def _mean_with_interval(values: list[float]) -> tuple[float, float, float]:
    """The mean and its 95 % interval by Student's t (the mean itself for a single value)."""
    from octavo.bench.statistics import mean_interval

    mean = sum(values) / len(values)
    low, high = mean_interval(values) or (mean, mean)
    return mean, mean if low is None else low, mean if high is None else high


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
    )


def _load_title(streams: int) -> str:
    return "synchronous" if streams == 1 else f"concurrent, {streams} streams"


def commands(config: QuickstartConfig, model_dir: Path, loads: list[dict[str, Any]]) -> list[str]:
    """The commands that do the same one by one."""
    how = ["--scheme", config.scheme, "--algorithm", config.algorithm]
    how += ["--num-calibration-samples", str(config.num_calibration_samples)]
    how += ["--max-seq-length", str(config.max_seq_length), "--output-dir", str(model_dir)]
    text = ["--dataset", "builtin", "--window", str(PERPLEXITY_WINDOW)]
    lines = [
        ["octavo", "compress", config.model, *how],
        ["octavo", "eval", "perplexity", config.model, *text],
        ["octavo", "eval", "perplexity", str(model_dir), *text],
        ["octavo", "serve", str(model_dir)],
    ]
    return [*(shlex.join(line) for line in lines), *(load["command"] for load in loads)]
