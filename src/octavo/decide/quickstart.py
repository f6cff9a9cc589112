"""`octavo quickstart`: compress a model, measure what it lost, serve it, load it, and say whether to deploy it."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from octavo.bench.slo import Slo
from octavo.decide import steps
from octavo.decide.config import QuickstartConfig
from octavo.decide.kv_memory import KVMemory, kv_memory_at_peak
from octavo.decide.narrator import Narrator
from octavo.decide.prefix_trial import Round, run_prefix_trial
from octavo.decide.prometheus import CacheLayout, MetricsSampler, read_cache_layout
from octavo.decide.report import Result, render
from octavo.decide.server_process import ServerProcess
from octavo.decide.verdict import Verdict, advise, check_load, check_perplexity, check_size
from octavo.folders import output_folder
from octavo.machine import cpu_name
from octavo.version import __version__

KV_GAUGES = ("num_requests_running", "kv_cache_usage_perc")
SAMPLE_SECONDS = 0.1


class _Loop:
    """One run: its settings, its objective and the folder it writes to."""

    def __init__(self, config: QuickstartConfig) -> None:
        self.config = config
        self.slo = Slo.parse(config.slo)
        self.folder = output_folder(config.output_dir)
        self.narrator = Narrator(num_stages=6)


def quickstart(config: QuickstartConfig) -> Result:
    """Run the loop; returns what report.json holds. UserError or OctavoError when a step cannot be done.

    The server that it starts is gone when it returns, by whatever way.
    """
    loop = _Loop(config)
    begin = time.monotonic()
    with _sigterm_as_interrupt():
        return _run(loop, begin)


def _run(loop: _Loop, begin: float) -> Result:
    config, folder = loop.config, loop.folder
    _state_objectives(loop)
    with loop.narrator.stage(f"compress {config.model} to {config.scheme} with {config.algorithm}"):
        compression = steps.compress(config, folder)
        size = compression.size
        loop.narrator.size(compression)
    with loop.narrator.stage("perplexity on held-out text, before and after"):
        perplexity = steps.compare_perplexity(config.perplexity_windows, config.model, str(compression.model_dir))
        before, after = perplexity["before"]["perplexity"], perplexity["after"]["perplexity"]
        loop.narrator.say(f"{before:.2f} before, {after:.2f} after: {perplexity['rise_percent']:+.1f} %")
    with ExitStack() as stack:
        with loop.narrator.stage("serve the compressed model"):
            server = stack.enter_context(ServerProcess(str(compression.model_dir), log=folder / "server.log"))
            loop.narrator.say(f"{server.url} answered after {server.start_seconds:.1f} s")
        with loop.narrator.stage("five questions at once, with different system prompts and with the same"):
            layout = read_cache_layout(server.url)
            rounds = run_prefix_trial(server.url, str(compression.model_dir), layout.max_model_len)
            loop.narrator.rounds(rounds)
        with loop.narrator.stage("load: one request at a time, then several"):
            loads = [steps.load(config, folder, server.url, streams=1)]
            with MetricsSampler(server.url, KV_GAUGES, SAMPLE_SECONDS) as sampler:
                loads.append(steps.load(config, folder, server.url, config.streams))
            loop.narrator.loads(loads)
            kv = _kv_memory(layout, sampler)
            loop.narrator.kv(kv)
    with loop.narrator.stage("decide"):
        verdict = _decide(loop, size, perplexity, loads)
        result = _collect(loop, compression, perplexity, rounds, loads, kv, verdict, time.monotonic() - begin)
    _write(loop, result, verdict)
    return result


def _state_objectives(loop: _Loop) -> None:
    loop.narrator.head("Objectives, stated before anything is measured")
    loop.narrator.say(f"perplexity at most {loop.config.max_perplexity_increase:g} % higher than the original's")
    loop.narrator.say(loop.slo.describe())


def _decide(loop: _Loop, size: dict[str, Any], perplexity: dict[str, Any], loads: list[dict[str, Any]]) -> Verdict:
    checks = [
        check_size(size["before"]["bytes"], size["after"]["bytes"]),
        check_perplexity(
            perplexity["before"]["perplexity"],
            perplexity["after"]["perplexity"],
            loop.config.max_perplexity_increase,
            perplexity["rise_ci95"],
        ),
    ]
    text = loop.slo.describe()
    checks += [check_load(f"{load['title']} load", text, load["slo"], load["slo"]["requests_judged"]) for load in loads]
    return Verdict(tuple(checks), advise(checks, loop.config.scheme))


def _collect(
    loop: _Loop,
    compression: steps.Compression,
    perplexity: dict[str, Any],
    rounds: list[Round],
    loads: list[dict[str, Any]],
    kv: KVMemory,
    verdict: Verdict,
    seconds: float,
) -> Result:
    config = loop.config
    return {
        "octavo": __version__,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": {"cpu_count": os.cpu_count(), "cpu": cpu_name(), "platform": platform.platform()},
        "model": config.model,
        "scheme": config.scheme,
        "algorithm": config.algorithm,
        "settings": dataclasses.asdict(config),
        "slo": {"text": loop.slo.describe(), "limits": loop.slo.limits, "percentile": loop.slo.percentile},
        "size": compression.size,
        "compression": compression.summary,
        "perplexity": perplexity,
        "prefix": [_round_result(entry) for entry in rounds],
        "loads": loads,
        "kv": {
            **dataclasses.asdict(kv),
            "load": loads[-1]["title"],
            "paged_bytes": kv.paged_bytes,
            "contiguous_bytes": kv.contiguous_bytes,
            "ratio": kv.ratio,
        },
        "verdict": {
            "is_deploy": verdict.is_deploy,
            "headline": verdict.headline,
            "checks": [dataclasses.asdict(check) for check in verdict.checks],
            "advice": list(verdict.advice),
        },
        "next_command": _next_command(config, compression.model_dir, verdict),
        "commands": steps.commands(config, compression.model_dir, loads),
        "stages": loop.narrator.stages,
        "seconds": seconds,
    }


def _round_result(entry: Round) -> dict[str, Any]:
    return {
        **dataclasses.asdict(entry),
        "hit_rate": entry.hit_rate,
        "peak_running": entry.peak_running,
        "mean_first_token_s": entry.mean_first_token_s,
    }


def _next_command(config: QuickstartConfig, model_dir: Path, verdict: Verdict) -> str:
    """Deploy what was measured, or measure the next candidate."""
    if verdict.is_deploy:
        return shlex.join(
            ["octavo", "serve", str(model_dir), "--served-model-name", f"{config.model}-{config.scheme.lower()}"]
        )
    missed = {check.name for check in verdict.checks if not check.is_met}
    if "quality" in missed and config.scheme != "W8A16":
        return shlex.join(["octavo", "quickstart", config.model, "--scheme", "W8A16"])
    sweep = ["octavo", "bench", "--target", "http://127.0.0.1:8000", "--profile", "sweep", "--slo", config.slo]
    return f"{shlex.join(['octavo', 'serve', str(model_dir)])}   # and beside it: {shlex.join(sweep)}"


def _kv_memory(layout: CacheLayout, sampler: MetricsSampler) -> KVMemory:
    usable = layout.num_blocks - 1  # block 0 holds nothing
    samples = [sample.values for sample in sampler.samples]
    return kv_memory_at_peak(samples, usable, layout.block_size, layout.bytes_per_token, layout.max_model_len)


def _write(loop: _Loop, result: Result, verdict: Verdict) -> None:
    (loop.folder / "report.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (loop.folder / "report.html").write_text(render(result), encoding="utf-8")
    loop.narrator.verdict(verdict, loop.folder / "report.html", result["seconds"], result["next_command"])


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a Python program without unwinding it; as an exception it lets the server be stopped first."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: signals are not ours there
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
