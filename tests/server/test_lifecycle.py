"""Starting, draining and dying, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from servers import launch, real_server

from octavo.errors import UserError
from octavo.server.config import ServerConfig
from octavo.server.listener import bind

ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22}
LONG = {"prompt": [7] * 16, "max_tokens": 490, "ignore_eos": True, "stream": True}


def test_a_port_in_use_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} of 127.0.0.1 is in use.*--port"):
            bind(ServerConfig(port=port))
        process = launch(tmp_path, "/no/such/model", {}, {"port": port})
        assert process.wait(60) == 1
        assert f"UserError: port {port}" in (tmp_path / "log").read_text()


def test_addresses_that_cannot_be_bound() -> None:
    with pytest.raises(UserError, match="host"):
        bind(ServerConfig(host="no.such.host.invalid"))
    with pytest.raises(UserError, match=r"cannot listen on port 8000 of 203\.0\.113\.1"):
        bind(ServerConfig(host="203.0.113.1"))


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    process = launch(tmp_path, str(tmp_path / "model"), {}, {"port": 0})
    assert process.wait(120) == 1
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert str(tmp_path / "model") in log


def test_sigterm_drains(tiny_llama: Path, tmp_path: Path) -> None:
    settings = {"shutdown_timeout": 60}
    with real_server(tmp_path, str(tiny_llama), ENGINE, settings) as server, ThreadPoolExecutor(1) as pool:
        assert server.process is not None
        answer = pool.submit(server.post, "/v1/completions", LONG | {"n": 4, "temperature": 0})
        server.wait_for(lambda m: m["num_requests_running"] == 4)
        server.process.send_signal(signal.SIGTERM)
        text = answer.result().text
        assert text.count('"finish_reason":"length"') == 4
        assert text.endswith("data: [DONE]\n\n")
        assert server.process.wait(30) == 0
        with pytest.raises(httpx.TransportError):
            server.get("/health")


def test_a_killed_engine_is_noticed(tiny_llama: Path, tmp_path: Path) -> None:
    settings = {"engine_death_timeout": 3}
    with real_server(tmp_path, str(tiny_llama), ENGINE, settings) as server, ThreadPoolExecutor(2) as pool:
        assert server.process is not None
        engine = next(
            child
            for child in psutil.Process(server.process.pid).children()
            if "octavo.engine.process" in child.cmdline()
        )
        streamed = pool.submit(server.post, "/v1/completions", LONG | {"n": 8})
        plain = pool.submit(server.post, "/v1/completions", LONG | {"n": 8, "stream": False})
        server.wait_for(lambda m: m["num_requests_running"] == 16)
        os.kill(engine.pid, signal.SIGKILL)
        deadline = time.monotonic() + 2
        while server.get("/health").status_code == 200:
            assert time.monotonic() < deadline, "/health stayed 200 for more than 2 s"
            time.sleep(0.02)
        assert server.get("/health").status_code == 503
        assert plain.result().status_code == 503
        assert "engine" in plain.result().json()["error"]["message"]
        assert '"error":{"message":"the engine' in streamed.result().text
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        assert server.post("/v1/completions", LONG).status_code == 503
        assert server.process.wait(30) == 1
        assert server.log is not None
        assert "EngineDeadError" in server.log.read_text()
