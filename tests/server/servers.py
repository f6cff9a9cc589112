"""Starts servers for the tests: a real one in its own process, or the application alone over a fake engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from octavo.server.app import build_app
from octavo.server.config import ServerConfig
from octavo.server.state import ServerState

START_SECONDS = 240  # a quiet machine needs about 6, a busy one many times that
_SCRIPT = """
import json, sys
from octavo.engine.config import EngineConfig
from octavo.errors import OctavoError
from octavo.server.config import ServerConfig
from octavo.server.run import serve
engine, server = (json.loads(text) for text in sys.argv[1:])
try:
    serve(EngineConfig(**engine), ServerConfig(**server))
except OctavoError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@dataclass
class RunningServer:
    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=60, **kwargs)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, headers=self.headers | (headers or {}), timeout=60)

    def metrics(self) -> dict[str, float]:
        """Samples by name, summed over labels; `name{reason}` for those with a finished_reason."""
        samples: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("#"):
                continue
            name, _, value = line.rpartition(" ")
            base = name.partition("{")[0]
            samples[base] = samples.get(base, 0.0) + float(value)
            if 'finished_reason="' in name:
                reason = name.partition('finished_reason="')[2].partition('"')[0]
                samples[f"{base}:{reason}"] = float(value)
        return samples

    def wait_for(self, condition: Callable[[dict[str, float]], bool], seconds: float = 30) -> dict[str, float]:
        """Metrics as soon as they fulfil the condition; fails when they do not in time."""
        deadline = time.monotonic() + seconds
        while True:
            samples = self.metrics()
            if condition(samples):
                return samples
            assert time.monotonic() < deadline, f"the metrics never got there: {samples}"
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(folder: Path, model: str, engine: dict[str, Any], server: dict[str, Any]) -> subprocess.Popen[bytes]:
    """`serve` in a process of its own; its output goes to folder/log."""
    arguments = [json.dumps({"model": model, **engine}), json.dumps(server)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-c", _SCRIPT, *arguments], stdout=log, stderr=log, env=environment)


@contextlib.contextmanager
def real_server(folder: Path, model: str, engine: dict[str, Any], server: dict[str, Any]) -> Iterator[RunningServer]:
    """A server with a real engine, on a free port, up and healthy."""
    port = free_port()
    process = launch(folder, model, engine, {"port": port, **server})
    running = RunningServer(f"http://127.0.0.1:{port}", process, folder / "log")
    keys = server.get("api_key")
    if keys:
        running.headers = {"authorization": f"Bearer {keys[0]}"}
    try:
        _wait_until_up(running)
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_up(server: RunningServer) -> None:
    assert server.process is not None
    assert server.log is not None
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(httpx.TransportError):
            if server.get("/health").status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{server.log.read_text()}")


@contextlib.contextmanager
def app_server(client: Any, config: ServerConfig, tokenizer: Any) -> Iterator[RunningServer]:
    """The application over a fake engine client, in a thread of this process."""
    port = free_port()
    state = ServerState.create(client, config, tokenizer)
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(state), port=port, lifespan="off", ws="none", log_level="error", timeout_graceful_shutdown=5
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline, "uvicorn did not start"
        time.sleep(0.01)
    running = RunningServer(f"http://127.0.0.1:{port}")
    if config.api_key:
        running.headers = {"authorization": f"Bearer {config.api_key[0]}"}
    try:
        yield running
    finally:
        server.should_exit = True
        thread.join(20)
