"""`octavo bench`: everything from the settings to the three report files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from octavo.bench import console, profiles, report, vocabulary, workload
from octavo.bench.analysis import run_report
from octavo.bench.client import LoadClient
from octavo.bench.config import SECRET_FIELDS, BenchConfig
from octavo.bench.http1 import HttpClient
from octavo.bench.load import Limits, Loader
from octavo.bench.metrics_scrape import MetricsScraper
from octavo.bench.records import RequestRecord
from octavo.bench.slo import Slo, highest_holding, requests_to_decide
from octavo.bench.trace import TraceEntry, read_trace, trace_workload
from octavo.errors import OctavoError
from octavo.folders import output_folder


@dataclass
class BenchResult:
    """What a load found: `report` is the content of benchmark.json, `files` what was written, `exit_code` 0 or 1."""

    report: dict[str, Any]
    exit_code: int
    files: list[Path] = field(default_factory=list)

    @property
    def runs(self) -> list[dict[str, Any]]:
        return self.report["runs"]


def run(config: BenchConfig, *, quiet: bool = False) -> BenchResult:
    """Load the server as told, print a table, write benchmark.json, .csv and .html.

    Ctrl-C ends the load and keeps what was measured. Exit code 1: interrupted, a run without a completed request, or an
    objective missed with --fail-on-slo. Raises UserError for settings that make no sense, OctavoError for a server that
    cannot be measured.
    """
    config.check()
    slo = Slo.parse(config.slo) if config.slo else None
    trace = read_trace(Path(config.data)) if config.profile == "replay" else []
    plans = profiles.plans(config, [entry.seconds for entry in trace])  # raises before anything is sent
    output_dir = output_folder(config.output_dir)
    screen = console.Screen(quiet)
    measured, records = _run_loop(_measure(config, slo, plans, trace, screen))
    files = report.write(measured, output_dir)
    if config.save_requests:
        files.append(_write_requests(records, output_dir / "requests.jsonl"))
    screen.results(measured, files)
    return BenchResult(measured, _exit_code(config, measured), files)


async def _measure(
    config: BenchConfig, slo: Slo | None, plans: Any, trace: list[TraceEntry], screen: console.Screen
) -> tuple[dict[str, Any], list[tuple[str, list[RequestRecord]]]]:
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    http = HttpClient(config.base_url(), headers=headers)
    client = LoadClient(config, http)
    limits = Limits(config.max_requests, config.time_limit(), config.drain_seconds, config.max_concurrency)
    runs: list[dict[str, Any]] = []
    kept: list[tuple[str, list[RequestRecord]]] = []
    stop = asyncio.Event()
    salt = config.prompt_salt if config.prompt_salt is not None else secrets.token_hex(8)
    try:
        with _interruptible(stop, screen):
            await client.connect()
            supply = await _make_workload(config, client, salt, trace)
            notes = _notes(config, slo, supply)
            screen.start(config, slo, supply.description, notes)
            await client.preflight(supply.probe())
            plan = next(plans, None)
            while plan is not None and not stop.is_set():
                entry, records = await _one_run(client, supply, limits, plan, config, slo, stop, screen)
                runs.append(entry)
                kept.append((plan.title, records))
                screen.run_done(plan, entry)
                try:
                    plan = plans.send(entry)
                except StopIteration:
                    plan = None
            environment = await _environment(client)
    finally:
        await http.close()
    document = _document(config, slo, runs, notes, environment, supply, stop.is_set())
    document["config"]["prompt_salt"] = salt  # so that the very same prompts can be sent again
    return document, kept


async def _one_run(
    client: LoadClient, supply: workload.Workload, limits: Limits, plan: profiles.RunPlan,
    config: BenchConfig, slo: Slo | None, stop: asyncio.Event, screen: console.Screen,
) -> tuple[dict[str, Any], list[RequestRecord]]:  # fmt: skip
    async with MetricsScraper(client.http, config.scrape_interval) as scraper:
        with screen.progress(plan, limits) as on_finished:
            load = await Loader(client, supply, limits, stop, on_finished).run(plan)
    entry = run_report(plan, load, limits, slo, config.warmup, config.cooldown)
    entry["server_metrics"] = scraper.summary(load.start_ns)
    if entry["server_metrics"] is None and config.scrape_interval > 0:
        entry["warnings"].append(f"no server metrics ({scraper.error})")
    return entry, load.records


async def _make_workload(
    config: BenchConfig, client: LoadClient, salt: str, trace: list[TraceEntry]
) -> workload.Workload:
    as_text = config.request_format == "chat"
    if trace:
        return trace_workload(trace, await _vocabulary(config, client, as_text), salt, as_text)
    path = Path(config.data)
    if config.data.endswith(".jsonl") or path.is_file():
        return workload.from_file(path, config.request_format)
    spec = workload.SyntheticSpec.parse(config.data)
    words = await _vocabulary(config, client, as_text)
    return workload.synthetic(spec, words, config.seed, salt, as_text)


async def _vocabulary(config: BenchConfig, client: LoadClient, as_text: bool) -> vocabulary.Vocabulary:
    if config.processor:
        return await vocabulary.find(vocabulary.processor_tokenize(config.processor), config.processor)

    async def tokenize(text: str) -> list[int]:
        body = {"model": client.model, "prompt": text, "content": text, "add_special_tokens": False}
        answer = await client.get_json("/tokenize", body)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(t, int) for t in tokens):
            raise OctavoError("/tokenize did not answer with a list of token ids")
        return tokens

    try:
        return await vocabulary.find(tokenize, "the server's tokenizer")
    except OctavoError:
        return vocabulary.assumed(as_text)  # its origin says so in the report


def _notes(config: BenchConfig, slo: Slo | None, supply: workload.Workload) -> list[str]:
    """Warnings that are known before the load."""
    notes: list[str] = []
    num_runs = profiles.count_runs(config)
    total = config.max_requests * num_runs if config.max_requests is not None else None
    if warning := supply.warning(total):
        notes.append(warning)
    if "estimated" in supply.description and config.request_format == "chat":
        notes.append("prompt lengths are estimates; the report has the server's own counts beside them")
    needed = requests_to_decide(slo) if slo else None
    if needed is not None and config.max_requests is not None and config.max_requests < needed:
        notes.append(
            f"{config.max_requests} requests a run cannot show {slo.percentile:g} % with confidence even if all hold; "  # type: ignore[union-attr]
            f"that takes {needed}"
        )
    return notes


async def _environment(client: LoadClient) -> dict[str, Any]:
    """What the figures depend on, as far as a client can see it."""
    try:
        answer = await client.get_json("/version", timeout=5.0)
        server = answer.get("version") if isinstance(answer, dict) else None
    except OctavoError:
        server = None  # many servers have no such route
    try:
        version = metadata.version("octavo")
    except metadata.PackageNotFoundError:
        version = None
    return {
        "octavo": version,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "server_version": server,
        "model": client.model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _document(
    config: BenchConfig, slo: Slo | None, runs: list[dict[str, Any]], notes: list[str],
    environment: dict[str, Any], supply: workload.Workload, is_interrupted: bool,
) -> dict[str, Any]:  # fmt: skip
    settings = {k: v for k, v in asdict(config).items() if k not in SECRET_FIELDS}
    return {
        "runs": runs,
        "environment": environment,
        "command": config.command(),
        "label": config.label,
        "slo": {"text": slo.describe(), **asdict(slo), "highest_load": highest_holding(runs)} if slo else None,
        "workload": supply.description,
        "notes": notes,
        "interrupted": is_interrupted,
        "config": settings,
        "definitions": report.DEFINITIONS,
    }


def _exit_code(config: BenchConfig, measured: dict[str, Any]) -> int:
    runs = measured["runs"]
    if measured["interrupted"] or not runs or any(not r["requests"]["completed"] for r in runs):
        return 1
    return int(config.fail_on_slo and any(r["slo"]["met"] is False for r in runs))


def _write_requests(runs: list[tuple[str, list[RequestRecord]]], path: Path) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for title, records in runs:
            origin = min((r.scheduled_ns for r in records), default=0)
            for record in records:
                file.write(json.dumps({"run": title} | record.as_dict(origin)) + "\n")
    return path


@contextlib.contextmanager
def _interruptible(stop: asyncio.Event, screen: console.Screen) -> Iterator[None]:
    """The first Ctrl-C ends the load gently; a second one ends the program."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        screen.say("interrupted: writing what was measured (Ctrl-C again to leave at once)")
        stop.set()

    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except NotImplementedError:  # Windows: asyncio.run turns Ctrl-C into a cancellation
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _run_loop(coroutine: Any) -> Any:
    """Run on uvloop where it is installed; in a thread of its own when the caller is inside a loop (a notebook)."""

    def start() -> Any:
        factory = None
        if sys.platform != "win32":
            with contextlib.suppress(ImportError):
                import uvloop

                factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(coroutine)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return start()
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(start())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="octavo-bench")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
