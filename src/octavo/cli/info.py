"""Versions, devices, and which kernel serves each operation and why the others do not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from typing import Any

from octavo.cli.common import print_json, print_table
from octavo.machine import cpu_name
from octavo.settings import setting

PACKAGES = ("octavo", "torch", "transformers", "safetensors", "gguf", "numpy", "fastapi", "uvicorn", "pyzmq", "httpx")


@dataclass
class InfoSettings:
    """How to print it."""

    json: bool = setting(False, "Print JSON instead of tables")


def settings() -> tuple[type, ...]:
    return (InfoSettings,)


def run(s: InfoSettings) -> int:
    from octavo import ops

    versions = {name: _version(name) for name in PACKAGES}
    devices = _devices()
    kernels = [list(row) for row in ops.report()]
    if s.json:
        names = ("operation", "candidate", "chosen", "reason")
        listed = [dict(zip(names, row, strict=True)) for row in kernels]
        print_json({"versions": versions, "devices": devices, "kernels": listed})
        return 0
    print_table("Versions", ("package", "version"), list(versions.items()), is_text=True)
    print_table("Devices", ("what", "value"), [(k, str(v)) for k, v in devices.items()], is_text=True)
    rows = [(str(op), str(name), "runs" if chosen else "", str(reason)) for op, name, chosen, reason in kernels]
    print_table("Kernels", ("operation", "candidate", "", "why"), rows, is_text=True)
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cpu cores": os.cpu_count(),
        "cpu threads of torch": torch.get_num_threads(),
        "cpu instructions": torch.backends.cpu.get_cpu_capability(),
        "cuda devices": torch.cuda.device_count(),
    }
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found[f"cuda:{i}"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    return found
