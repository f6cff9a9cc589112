"""NVIDIA's multi-process service, by which the kernels of many processes run on one GPU side by side, not in turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
PROBE = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"]


@contextmanager
def multi_process_service(probe: list[str] = PROBE) -> Iterator[dict[str, str]]:
    """The environment that processes need to share a GPU; nothing, and a line that says so, where that does not work.

    A service of its own, with its pipes in a temporary folder, so that nobody else's is touched; it ends with the
    context. `probe` is a client that is tried first: in a container the service may start and no client reach it.
    """
    control = shutil.which(CONTROL)
    if control is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        everything = os.environ | environment
        started = subprocess.run([control, "-d"], env=everything, capture_output=True, text=True)
        if started.returncode:
            print(f"{CONTROL} did not start: {(started.stderr or started.stdout).strip()}", flush=True)
            yield {}
            return
        try:
            tried = subprocess.run(probe, env=everything, capture_output=True, text=True)
            if tried.returncode:
                print(f"{CONTROL} is of no use here: {tried.stderr.strip()[-300:]}", flush=True)
            yield {} if tried.returncode else environment
        finally:
            subprocess.run([control], input="quit\n", env=everything, capture_output=True, text=True, timeout=60)
