"""A server of our own in a child process: started on a free port, waited for, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx

from octavo.errors import OctavoError

START_SECONDS = 180.0
STOP_SECONDS = 15.0
_PR_SET_PDEATHSIG = 1


class ServerProcess:
    """`octavo serve MODEL` as a context manager; `url` answers inside the block.

    The child gets SIGTERM when the block is left by any way, SIGKILL when it does not end in time; on Linux the kernel
    also ends it when this process is killed. Its output goes to `log` (a temporary file when none is given).
    """

    def __init__(
        self,
        model: str,
        flags: Sequence[str] = (),
        log: Path | None = None,
        program: Sequence[str] = (sys.executable, "-m", "octavo", "serve"),
    ) -> None:
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._argv = [*program, model, "--port", str(self._port), *flags]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.start_seconds = 0.0

    def __enter__(self) -> Self:
        begin = time.monotonic()
        try:
            with self._open_log() as log:
                # Ctrl-C reaches the whole foreground group; in a group of its own the child waits for our SIGTERM
                self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                    preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                )
            self._wait_until_ready(begin + START_SECONDS)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the child, politely first. Calling it twice is fine."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except BaseException as error:  # too slow, or a second Ctrl-C: the group must go in any case
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    def _open_log(self) -> IO[bytes]:
        if self._log is None:
            handle, name = tempfile.mkstemp(prefix="octavo-serve-", suffix=".log")
            self._log = Path(name)
            return os.fdopen(handle, "wb")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        return self._log.open("wb")

    def _wait_until_ready(self, deadline: float) -> None:
        assert self._process is not None
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise OctavoError(f"the server ended with status {self._process.returncode}:\n{self._tail()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return
            time.sleep(0.1)
        raise OctavoError(f"the server did not answer within {START_SECONDS:.0f} s:\n{self._tail()}")

    def _tail(self, lines: int = 15) -> str:
        assert self._log is not None
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _die_with_parent() -> None:
    """In the child, before exec: SIGTERM when the parent dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
