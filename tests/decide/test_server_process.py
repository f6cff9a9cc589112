"""The child server: waited for, read, and gone by whatever way its parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from octavo.decide import server_process
from octavo.decide.prometheus import CacheLayout, MetricsSampler, read_cache_layout, read_metrics
from octavo.decide.server_process import ServerProcess
from octavo.errors import OctavoError

STUB = Path(__file__).with_name("stub_server.py")
PROGRAM = (sys.executable, str(STUB))


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and is_alive(pid):
        time.sleep(0.02)
    return not is_alive(pid)


def test_answers_inside_the_block_and_is_gone_after_it(tmp_path):
    with ServerProcess("plain", log=tmp_path / "x" / "server.log", program=PROGRAM) as server:
        pid = server._process.pid
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.start_seconds > 0
    assert not is_alive(pid)
    server.stop()  # a second time is fine


def test_gone_after_an_error_in_the_block(tmp_path):
    with pytest.raises(KeyboardInterrupt), ServerProcess("plain", log=tmp_path / "log", program=PROGRAM) as server:
        pid = server._process.pid
        raise KeyboardInterrupt
    assert not is_alive(pid)


def test_one_that_cannot_start_is_an_error_with_its_own_words(tmp_path):
    with pytest.raises(OctavoError, match=r"ended with status 1:\n.*the model is broken"):
        ServerProcess("fail", log=tmp_path / "log", program=PROGRAM).__enter__()


def test_one_that_never_answers_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(server_process, "START_SECONDS", 0.5)
    server = ServerProcess("mute", log=tmp_path / "log", program=PROGRAM)
    with pytest.raises(OctavoError, match="did not answer within"):
        server.__enter__()
    assert not is_alive(server._process.pid)


def test_one_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(server_process, "STOP_SECONDS", 0.3)
    with ServerProcess("stubborn", log=tmp_path / "log", program=PROGRAM) as server:
        pid = server._process.pid
    assert not is_alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent was killed")
def test_a_killed_parent_takes_it_along(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from octavo.decide.server_process import ServerProcess\n"
        f"server = ServerProcess('plain', log=Path({str(tmp_path / 'log')!r}), program={PROGRAM!r}).__enter__()\n"
        "print(server._process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone(pid)


def test_metrics_are_read_once_under_their_own_name(tmp_path):
    with ServerProcess("plain", log=tmp_path / "log", program=PROGRAM) as server:
        seen = read_metrics(server.url)
        assert seen["num_requests_running"] == 3.0  # not doubled by the alias without the prefix
        assert seen["request_success_total"] == 9.0
        assert read_cache_layout(server.url) == CacheLayout(101, 16, 23040, 8192)
        with MetricsSampler(server.url, ("num_requests_running", "unknown"), interval=0.001) as sampler:
            while len(sampler.samples) < 3:
                time.sleep(0.001)
    assert all(s.values == {"num_requests_running": 3.0, "unknown": 0.0} for s in sampler.samples)
    assert [s.seconds for s in sampler.samples] == sorted(s.seconds for s in sampler.samples)
