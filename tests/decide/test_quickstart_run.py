"""The whole loop with the real parts: on a tiny model in the fast tier, on the demo model in the long one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.decide import quickstart as module
from octavo.decide.config import QuickstartConfig
from octavo.decide.quickstart import quickstart
from octavo.decide.server_process import ServerProcess


def check(result: dict, folder: Path, streams: int) -> None:
    """What holds for every run, whatever the machine measured."""
    size = result["size"]
    files = sum(f.stat().st_size for f in Path(folder).glob("model-*/*.safetensors"))
    assert size["after"]["bytes"] == pytest.approx(files, rel=0.05)  # the rest of a file is its header
    assert sum(size["after"]["parts"].values()) == size["after"]["bytes"] < size["before"]["bytes"]
    quality = result["perplexity"]
    rise = 100 * (quality["after"]["perplexity"] / quality["before"]["perplexity"] - 1)
    assert quality["rise_percent"] == pytest.approx(rise)
    assert quality["rise_ci95"][0] <= rise <= quality["rise_ci95"][1]
    different, same = result["prefix"]
    assert different["hit_rate"] == 0
    assert same["hit_rate"] > 0.3
    assert [most_at_once(entry["answers"]) for entry in result["prefix"]] == [5, 5]
    assert 1 < max(different["peak_running"], same["peak_running"]) <= 5
    assert [load["profile"] for load in result["loads"]] == ["synchronous", "concurrent"]
    assert all(load["requests"]["completed"] > 0 and load["requests"]["failed"] == 0 for load in result["loads"])
    kv = result["kv"]
    assert 1 <= kv["running"] <= streams
    assert kv["paged_bytes"] < kv["contiguous_bytes"]
    verdict = result["verdict"]
    assert verdict["is_deploy"] == all(entry["is_met"] for entry in verdict["checks"])
    assert json.loads((folder / "report.json").read_text(encoding="utf-8"))["verdict"] == verdict
    assert verdict["headline"] in (folder / "report.html").read_text(encoding="utf-8")


def most_at_once(answers: list[dict]) -> int:
    """The most questions that were open at one moment, by their own times."""
    assert len(answers) == 5
    spans = [(answer["asked_s"], answer["asked_s"] + answer["total_s"]) for answer in answers]
    return max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)


class Recorder(ServerProcess):
    """Remembers the servers that were started."""

    started: list[Recorder]

    def __enter__(self):
        Recorder.started.append(self)
        return super().__enter__()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None


@pytest.fixture
def servers(monkeypatch):
    Recorder.started = []
    monkeypatch.setattr(module, "ServerProcess", Recorder)
    monkeypatch.setenv("OCTAVO_KV_CACHE_MEMORY_BYTES", "256MiB")
    return Recorder.started


def test_the_loop_on_a_tiny_model(tiny_llama, tmp_path, servers, capsys):
    config = QuickstartConfig(
        model=str(tiny_llama),
        output_dir=str(tmp_path),
        algorithm="rtn",
        perplexity_windows=2,
        load_seconds=1.5,
        streams=3,
        slo="ttft_ms=60000,itl_ms=60000",
        max_perplexity_increase=1e6,
    )
    result = quickstart(config)
    check(result, tmp_path, streams=3)
    assert result["verdict"]["is_deploy"]
    assert len(servers) == 1
    assert not servers[0].is_running
    said = capsys.readouterr().out
    assert "[6/6] decide" in said
    assert "go on with: octavo serve" in said


def test_a_step_that_fails_leaves_no_server(tiny_llama, tmp_path, servers, monkeypatch):
    def interrupted(*_):
        assert servers[0].is_running
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_prefix_trial", interrupted)
    config = QuickstartConfig(str(tiny_llama), str(tmp_path), algorithm="rtn", perplexity_windows=1)
    with pytest.raises(KeyboardInterrupt):
        quickstart(config)
    assert not servers[0].is_running
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_the_loop_on_the_demo_model(demo_path, tmp_path, servers):
    config = QuickstartConfig(str(demo_path), str(tmp_path), num_calibration_samples=8, perplexity_windows=6)
    result = quickstart(config)
    check(result, tmp_path, streams=config.streams)
    assert max(entry["peak_running"] for entry in result["prefix"]) > 1
    assert 0.5 < result["size"]["saved_percent"] / 100 < 0.65
    assert 5 < result["perplexity"]["before"]["perplexity"] < result["perplexity"]["after"]["perplexity"] < 40
    assert "GGUF" in result["size"]["note"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_its_server(demo_path, tmp_path, how):
    """A signal in the middle of the load: exit code 130, and nothing is left."""
    flags = ["--output-dir", str(tmp_path), "--algorithm", "rtn", "--perplexity-windows", "1"]
    command = subprocess.Popen([sys.executable, "-m", "octavo", "quickstart", str(demo_path), *flags])
    log = tmp_path / "server.log"
    deadline = time.monotonic() + 240
    while "POST /v1/chat/completions" not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline
        assert command.poll() is None
        time.sleep(0.1)
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    assert children
    command.send_signal(how)
    assert command.wait(60) == 130
    for pid in map(int, children):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
