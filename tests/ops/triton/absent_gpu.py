"""Scripts that compile kernels for a GPU that is not there, in a process of their own: this one interprets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_START = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class Absent:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Absent())
"""


def run_without_gpu(script: str, cache: Path) -> list[str]:
    """The lines that `script` prints, with a GPU of compute capability 9.0 that only compiles."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _START + script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
