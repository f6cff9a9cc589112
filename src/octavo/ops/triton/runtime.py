"""What the Triton kernels need to know about the machine, without importing triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


@functools.cache
def unavailable() -> str | None:
    """Why Triton kernels cannot run in this process, or None."""
    if not torch.cuda.is_available():
        return "torch finds no usable GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"needs compute capability 8.0 or later, this GPU has {capability[0]}.{capability[1]}"
    return None


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 elsewhere, where kernels run under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it has ended (programmatic dependent launch, Hopper on).

    Such a kernel calls `gdc_wait()` before it reads or writes memory, and only then `gdc_launch_dependents()`, so that
    whatever starts early may rely on everything older than its direct predecessor.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


dependent_launch = True  # false: every kernel waits for the one ahead, to compare


def uses_dependent_launch(device: torch.device) -> bool:
    """Whether kernels are launched so, which `dependent_launch` can switch off."""
    return dependent_launch and has_dependent_launch(device)


@functools.cache
def is_native() -> bool:
    """Whether kernels are compiled, and may hold instructions of the GPU, or run under Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") != "1"


MAX_SHARED = 227 << 10  # bytes of shared memory of a program on Hopper
_COUNTERS = 1 << 14
_counters: dict[torch.device, torch.Tensor] = {}


def counters(device: torch.device, needed: int = 0) -> torch.Tensor:
    """Zeros, int32, that each kernel leaves zero: programs that share a result count themselves. One stream at a time.

    Made when a weight is packed, so before a CUDA graph is captured.
    """
    assert needed <= _COUNTERS
    found = _counters.get(device)
    if found is None:
        found = _counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    return found


@functools.cache
def one(device: torch.device) -> torch.Tensor:
    """The number 1, float32: a scale that changes nothing. Made when a weight is packed, as `counters` are."""
    return torch.ones((), device=device)


class Tile(NamedTuple):
    """Sizes of a product kernel: rows of x, rows and stored columns of the weight, parts of K, warps, stages.

    One row of x means the kernel without matrix units. Stored columns are bf16 values, 8-bit codes or words of 4-bit
    ones. No part of K means cuBLAS, with kernels of their own for what would have been fused.
    """

    rows: int
    n: int
    k: int
    split: int
    warps: int
    stages: int


BUCKETS = (1, 16, 32, 64, 128, 256)
FEWEST = 8  # up to here a table may have a tile of its own: half the rows of the next bucket take less shared memory


def bucket(m: int) -> int:
    """The smallest number of rows with tiles of its own that is at least m."""
    return next((rows for rows in BUCKETS if m <= rows), BUCKETS[-1])


@functools.cache
def tile(kind: str, n: int, k: int, m: int) -> Tile:
    """The sizes for m rows of x and a weight [n, k] of kind "bf16", "int4" or "int8", from the table of this GPU."""
    key, tiles = bucket(m), tuned_tiles()
    fewest = tiles.get((kind, n, k, FEWEST)) if 1 < m <= FEWEST else None
    return fewest or tiles.get((kind, n, k, key)) or default_tile(kind, n, k, key)


@functools.cache
def tuned_table() -> Path | None:
    """What `benchmarks/gpu_linear.py` measured on this model of GPU."""
    if not torch.cuda.is_available():
        return None
    path = Path(__file__).parent / "tuned" / f"{torch.cuda.get_device_name().replace(' ', '_')}.json"
    return path if path.is_file() else None


@functools.cache
def tuned_tiles() -> dict[tuple[str, int, int, int], Tile]:
    """(kind, n, k, bucket) -> Tile for this GPU."""
    path = tuned_table()
    return {} if path is None else read_tiles(path)


def read_tiles(path: Path) -> dict[tuple[str, int, int, int], Tile]:
    """Lines {"kind", "n", "k", "m", "tile": [6 numbers]} of a table of tiles."""
    entries = json.loads(path.read_text())
    return {(e["kind"], e["n"], e["k"], e["m"]): Tile(*e["tile"]) for e in entries if "tile" in e}


@functools.cache
def tuned_early() -> dict[tuple[str, int], tuple[int, int]]:
    """(kind, bucket) -> bytes of the largest weight whose product is launched early, and that is prefetched."""
    path = tuned_table()
    return {} if path is None else read_early(path)


def read_early(path: Path) -> dict[tuple[str, int], tuple[int, int]]:
    """Lines {"kind", "m", "dependent_bytes", "prefetch_bytes"} of a table, the last optional."""
    entries = [e for e in json.loads(path.read_text()) if "dependent_bytes" in e]
    return {
        (e["kind"], e["m"]): (e["dependent_bytes"], e.get("prefetch_bytes", _default_early(e["m"])[1])) for e in entries
    }


def _default_early(m: int) -> tuple[int, int]:
    return 24_000_000, 0 if m == 1 else 16 << 20


def dependent_bytes(kind: str, m: int) -> int:
    """Up to which size of a weight its product starts before the kernel ahead has ended.

    A product that runs for long gains little, and its waiting programs are in the way of those that still work.
    """
    return (tuned_early().get((kind, bucket(m))) or _default_early(m))[0]


def prefetch_bytes(kind: str, m: int) -> int:
    """Up to which size of a weight an early product asks for all of it: where waves of programs follow, that delays."""
    return (tuned_early().get((kind, bucket(m))) or _default_early(m))[1]


def default_tile(kind: str, n: int, k: int, m: int) -> Tile:
    """Sizes for a shape that nobody measured: about two programs a multiprocessor of an H200, and a few tiles each."""
    programs = 264
    if m == 1:
        if kind == "int4":  # a thread has four words of each row
            wide = k % 4096 == 0
            return Tile(1, 8, 512 if wide else 128, 1, 4 if wide else 1, 1)
        most = 8 if kind == "bf16" else 4  # codes take more registers
        return Tile(1, most if n >= most * programs else 4 if n >= 4 * programs else 2, 1024, 1, 4, 1)
    rows = min(m, 64)
    block = 64 if n < 16384 or rows < 64 else 128
    depth = 128
    split = max(1, min(programs * block // n, k // (2 * depth), 16))
    stages = 3 if rows > 32 else 4 if kind == "bf16" else 6
    return Tile(rows, block, depth, split, 8 if rows * block >= 8192 else 4, stages)


@functools.cache
def stages(tile: Tile, block_k: int, kind: str, group: int, has_offset: bool, is_gated: bool) -> int:
    """As many stages as the tile asks for and shared memory holds; one keeps the weight in registers."""
    sizes = (shared_bytes(tile, block_k, kind, group, has_offset, is_gated, i) for i in range(tile.stages, 1, -1))
    return tile.stages - next((i for i, size in enumerate(sizes) if size <= MAX_SHARED), tile.stages - 1)


def shared_bytes(tile: Tile, block_k: int, kind: str, group: int, has_offset: bool, is_gated: bool, stages: int) -> int:
    """A bound of the shared memory of `linear.few_rows_kernel`.

    A tile of bf16 stays there while it is multiplied, codes leave for registers. Scales that differ within a row of
    the tile, and offsets, are loaded for every weight. There is room for a tile that changes threads, in float32
    where it is made of codes.
    """
    if tile.rows == 1:
        return 0  # `gemv.py` holds its tiles in registers
    weights = 2 * tile.n if is_gated else tile.n
    each = {"bf16": 2 * block_k, "int8": block_k, "int4": 64}[kind]
    if kind != "bf16" and (has_offset or group % block_k):
        each += 4 * block_k * (2 if has_offset else 1)
    moved = (4 * tile.n if kind != "bf16" else 4 * tile.rows) * block_k
    buffers = stages if kind == "bf16" else stages - 1
    return buffers * weights * each + stages * (2 * tile.rows + 4) * block_k + moved


def lazy(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of `octavo.ops.triton.<module>`, imported when it is first called."""
    found: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(f"octavo.ops.triton.{module}"), name)
        return found(*args, **kwargs)

    return call
