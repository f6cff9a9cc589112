"""The service that lets processes share a GPU, with a stand-in for NVIDIA's program."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from mps import CONTROL, multi_process_service

CLIENT = [sys.executable, "-c", "import os; open(os.environ['CUDA_MPS_PIPE_DIRECTORY'] + '/control')"]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, start: str) -> Path:
    """A control program that does `start` when it is to start; the file to which it adds its arguments and input."""
    log, program = folder / "log", folder / CONTROL
    program.write_text(f'#!/bin/sh\nif [ "$1" = -d ]; then echo start >> {log}; {start}; else cat >> {log}; fi\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log


def test_it_has_pipes_of_its_own_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(tmp_path, monkeypatch, 'touch "$CUDA_MPS_PIPE_DIRECTORY/control"')
    with pytest.raises(KeyError, match="of the work"), multi_process_service(CLIENT) as environment:
        pipes = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert (pipes / "control").exists()
        assert log.read_text() == "start\n"
        raise KeyError("of the work")
    assert log.read_text() == "start\nquit\n"
    assert not pipes.exists()


def test_processes_take_turns_where_no_client_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(tmp_path, monkeypatch, "true")
    with multi_process_service(CLIENT) as environment:
        assert environment == {}
    assert log.read_text() == "start\nquit\n"


def test_processes_take_turns_where_it_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = install(tmp_path, monkeypatch, "echo no device >&2; exit 1")
    with multi_process_service(CLIENT) as environment:
        assert environment == {}
    assert log.read_text() == "start\n"
    assert "no device" in capsys.readouterr().out


def test_processes_take_turns_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with multi_process_service(CLIENT) as environment:
        assert environment == {}
