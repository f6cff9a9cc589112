"""Bf16 products of few rows on a GPU: equal shares (stream-K) and one-row variants beside the present tiles and cuBLAS.

    python benchmarks/gpu_linear_bf16.py TABLE.json [--models 8B,0.6B] [--rows 1,8,16,32,64,128] [--seconds 70]
    python benchmarks/gpu_linear_bf16.py --list      # the candidates, without a GPU

Checks every candidate against a float32 product on random input, times it as `gpu_linear.py` does, then runs whole
stacks of layers with the present tiles and with the best ones, and compares their results. TABLE.json gets what the
package has for this GPU with the best tiles put in.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_linear import (
    BANDWIDTH,
    CUBLAS,
    CUDA,
    MODELS,
    SPREAD,
    Job,
    Shape,
    expected,
    graph_seconds,
    make_stack,
    make_weight,
    parts_of,
    shapes,
    warm,
    write,
)  # fmt: skip

from octavo.ops.triton import linear, runtime
from octavo.ops.triton.runtime import Tile
from octavo.ops.triton.weights import DENSE_ROWS

STACKS = {"8B": (1, 8, 32), "0.6B": (1, 8, 32)}
LIMIT = 8e-3  # relative error of one rounding to bf16, and of some more
GAIN = 0.99  # a new tile has to take at most so much of the old one's time
# What one program a multiprocessor holds: 64 to 128 KiB of tiles on their way.
SHARES = {
    1: [Tile(8, 64, 128, -1, 4, 6), Tile(8, 64, 64, -2, 4, 6), Tile(8, 64, 128, -1, 8, 8)],
    8: [
        Tile(8, 64, 128, -1, 4, 6),
        Tile(8, 64, 64, -2, 4, 6),
        Tile(16, 64, 128, -1, 4, 6),
        Tile(16, 128, 128, -1, 8, 4),
    ],
    16: [Tile(16, 64, 128, -1, 4, 6), Tile(16, 64, 64, -2, 4, 6), Tile(16, 128, 128, -1, 8, 4)],
    32: [Tile(32, 64, 128, -1, 4, 6), Tile(32, 128, 64, -1, 8, 7), Tile(32, 64, 64, -2, 4, 6)],
    64: [Tile(64, 64, 128, -1, 4, 5), Tile(64, 128, 64, -1, 8, 6)],
    128: [Tile(128, 128, 64, -1, 8, 5)],
    256: [Tile(128, 128, 64, -1, 8, 5)],
}
# A warp alone needs no barrier to add what its threads hold.
NARROW = [Tile(1, 1, 1024, 1, 1, 1), Tile(1, 2, 1024, 1, 1, 1), Tile(1, 2, 1024, 1, 2, 1), Tile(1, 4, 512, 1, 1, 1)]


class Timed(NamedTuple):
    seconds: float
    tile: Tile


def key_of(rows: int) -> int:
    """The number of rows that the table names."""
    return runtime.FEWEST if 1 < rows <= runtime.FEWEST else runtime.bucket(rows)


def present(shape: Shape, rows: int) -> Tile:
    """The tile of the package; cuBLAS where it takes no kernel of its own."""
    return runtime.tile("bf16", shape.n, shape.k, rows) if rows <= DENSE_ROWS else CUBLAS


def candidates(shape: Shape, rows: int) -> list[Tile]:
    """The present tile first."""
    found = SHARES[key_of(rows)]
    if rows == 1 and shape.k <= 4096:
        found = [*found, *NARROW]
    return list(dict.fromkeys([present(shape, rows), *found]))


def all_jobs(models: list[str], rows: list[int]) -> list[Job]:
    return [
        Job("bf16", shape.at(m), m, tile)
        for model in models
        for shape in shapes(model, "bf16")
        for m in rows
        for tile in candidates(shape, m)
    ]


def time_tiles(shape: Shape, rows: int, weights: list[Any], tiles: list[Tile]) -> tuple[list[Timed], float]:
    """Seconds of each tile that computes what it should, and of F.linear alone."""
    x, parts = torch.randn(rows, shape.k, device=CUDA, dtype=torch.bfloat16), parts_of(shape, rows)
    wanted = expected(x, weights[0].data, parts)
    found = []
    for tile in tiles:
        error = float((weights[0].few(x, tile=tile, **parts).float() - wanted).norm() / wanted.norm())
        if not error < LIMIT:
            print(f"WRONG: {shape.name} M={rows} {tuple(tile)}: relative error {error:.2e}", flush=True)
            continue
        seconds = graph_seconds(lambda: [w.few(x, tile=tile, **parts) for w in weights])  # noqa: B023
        found.append(Timed(seconds / len(weights), tile))
    plain = graph_seconds(lambda: [F.linear(x, w.data) for w in weights]) / len(weights)
    return found, plain


def time_shape(shape: Shape, rows: list[int], good: set[Job]) -> dict[int, dict[str, Any]]:
    """For each number of rows: the best tile, and microseconds of the present one, the best and F.linear."""
    weights = [make_weight("bf16", shape.n, shape.k)]
    while len(weights) * weights[0].num_bytes < SPREAD and len(weights) < 64:
        weights.append(make_weight("bf16", shape.n, shape.k))
    lines = {}
    for m in rows:
        tiles = [tile for tile in candidates(shape, m) if Job("bf16", shape.at(m), m, tile) in good]
        timed, plain = time_tiles(shape.at(m), m, weights, tiles)
        old = next((t.seconds for t in timed if t.tile == present(shape, m)), float("nan"))
        if not timed:
            continue
        best = min(timed)
        lines[m] = {
            "shape": shape.name, "n": shape.n, "k": shape.k, "rows": m, "old": old * 1e6, "new": best.seconds * 1e6,
            "tile": list(best.tile), "linear": plain * 1e6, "limit": weights[0].num_bytes / BANDWIDTH * 1e6,
            "all": {str(tuple(t.tile)): round(t.seconds * 1e6, 2) for t in timed},
        }  # fmt: skip
    return lines


def show(model: str, lines: dict[int, list[dict[str, Any]]]) -> None:
    """A line of sums over a layer and one of its products, for each number of rows."""
    for m, found in lines.items():
        layer = [line for line in found if not line["shape"].endswith("head")]
        total = {key: sum(line[key] for line in layer) for key in ("old", "new", "linear", "limit")}
        print(
            f"{model} M={m}: us a layer old {total['old']:.1f} new {total['new']:.1f} F.linear {total['linear']:.1f} "
            f"limit {total['limit']:.1f}"
        )
        for line in found:
            others = sorted(line["all"].items(), key=lambda item: item[1])
            name = line["shape"].split()[1]
            print(f"   {name:8} old {line['old']:.1f} F.linear {line['linear']:.1f} |", *map(compact, others[:4]))
    print(end="", flush=True)


def compact(item: tuple[str, float]) -> str:
    return f"{item[0].replace(' ', '')}={item[1]:.1f}"


def time_stacks(model: str, rows: int, new: dict[tuple[str, int, int, int], Tile]) -> None:
    """A stack with the present tiles, then the new ones, the norm in the products and of its own."""
    run, num_bytes = make_stack(model, "bf16", rows)
    layers = MODELS[model].layers
    times, results = [], []
    usual = dict(runtime.tuned_tiles())
    for tiles, normed in ((usual, 16), (usual | new, 16), (usual | new, 1)):
        use(tiles)
        linear.NORMED_ROWS["bf16"] = normed
        y, residual = run()
        results.append(y.float() + residual.float())
        times.append(graph_seconds(run, 5) * 1e6 / layers)
    use(usual)
    linear.NORMED_ROWS["bf16"] = 16
    difference = [float((result - results[0]).norm() / results[0].norm()) for result in results[1:]]
    print(
        f"stack {model} M={rows}: us a layer old {times[0]:.1f} new {times[1]:.1f} with norms of their own "
        f"{times[2]:.1f}; reading the weights {num_bytes / BANDWIDTH * 1e6 / layers:.1f}; results differ by "
        f"{difference[0]:.1e} {difference[1]:.1e}",
        flush=True,
    )


def use(tiles: dict[tuple[str, int, int, int], Tile]) -> None:
    runtime.tuned_tiles().clear()
    runtime.tuned_tiles().update(tiles)
    runtime.tile.cache_clear()


def measure(pool: ProcessPoolExecutor, arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    models, rows = arguments.models.split(","), [int(m) for m in arguments.rows.split(",")]
    jobs = all_jobs(models, rows)
    failures = list(pool.map(warm, jobs, chunksize=2))
    for job, failure in zip(jobs, failures, strict=True):
        if failure:
            print("left out:", job.shape.name, job.rows, tuple(job.tile), failure)
    print(f"compiled {len(jobs)} candidates in {time.monotonic() - began:.0f} s", flush=True)
    good = {job for job, failure in zip(jobs, failures, strict=True) if not failure}
    entries: list[dict[str, Any]] = []
    report: list[dict[str, Any]] = []
    for model in models:
        lines: dict[int, list[dict[str, Any]]] = {m: [] for m in rows}
        for shape in shapes(model, "bf16"):
            for m, line in time_shape(shape, rows, good).items():
                lines[m].append(line)
        show(model, lines)
        found = [line for each in lines.values() for line in each]
        report += found
        better = [line for line in found if line["rows"] <= DENSE_ROWS and line["new"] < GAIN * line["old"]]
        best = [{"kind": "bf16", "m": key_of(line["rows"]), **pick(line)} for line in better]
        entries += best
        arguments.table.with_suffix(".all.json").write_text(json.dumps(report))
        write(arguments.table, entries)
        new = {("bf16", e["n"], e["k"], e["m"]): Tile(*e["tile"]) for e in best}
        for m in STACKS[model]:
            if m in rows and time.monotonic() - began < arguments.seconds:
                time_stacks(model, m, new)
                torch.cuda.empty_cache()
    print(f"{time.monotonic() - began:.0f} s in all")


def pick(line: dict[str, Any]) -> dict[str, Any]:
    return {key: line[key] for key in ("n", "k", "tile")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", type=Path, default=Path("gpu_linear_bf16.json"))
    parser.add_argument("--models", default="8B,0.6B")
    parser.add_argument("--rows", default="1,8,16,32,64,128")
    parser.add_argument("--seconds", type=float, default=70)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        for job in all_jobs(arguments.models.split(","), [int(m) for m in arguments.rows.split(",")]):
            print(job.shape.name, job.rows, tuple(job.tile))
        return
    with ProcessPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 2)), mp_context=get_context("spawn")) as pool:
        measure(pool, arguments)


if __name__ == "__main__":
    main()
