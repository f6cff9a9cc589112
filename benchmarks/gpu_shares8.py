"""8-bit products by equal shares beside the tiles of the table, for some rows, and whole stacks of layers with either.

    python benchmarks/gpu_shares8.py [--kinds fp8,w8a8] [--json PATH] [--write] [--no-stack]

Shapes are those of Llama-3.1-8B. Each tile is checked against exact sums, then timed in a CUDA graph over weights that
do not fit the second-level cache. A line for each kind and number of rows: microseconds a layer and of each of its
products, table -> best of the candidates. `--write` puts winners into the table of this GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path

import torch
from gpu_linear8 import KINDS, LIMITS, PROCESSES, SHAPES, Case, key_of, operands, write
from gpu_stack8 import LAYERS, Stack, graph_of, kernel_times, milliseconds

from octavo.ops.triton import linear_8bit, runtime
from octavo.ops.triton.ahead import compile_ahead
from octavo.ops.triton.linear_8bit import SHARES
from octavo.ops.triton.linear_8bit_shares import divide
from octavo.ops.triton.runtime import Tile

ROWS = (1, 8, 32, 64, 128, 256, 512)
STACK_ROWS = (1, 8, 32, 256)
# Up to a number of rows: rows of x, rows of W, bytes of each, warps, stages.
CANDIDATES = {
    16: [(16, 128, 128, 4, 10), (16, 64, 256, 4, 10), (16, 256, 128, 8, 5)],
    32: [(32, 128, 128, 4, 9), (32, 64, 256, 4, 8)],
    64: [(64, 128, 128, 4, 8), (64, 256, 128, 8, 4)],
    128: [(128, 128, 128, 8, 5), (128, 256, 128, 8, 3)],
    256: [(256, 128, 128, 8, 3), (128, 256, 128, 8, 3), (128, 128, 128, 8, 5)],
    1024: [(256, 128, 128, 8, 3), (128, 256, 128, 8, 3)],
}


def candidates(rows: int) -> list[Tile]:
    sizes = next(sizes for most, sizes in CANDIDATES.items() if rows <= most)
    return [Tile(m, n, k, SHARES, warps, stages) for m, n, k, warps, stages in sizes]


def compile_part(kinds: list[str], part: int) -> None:
    """Compile one part of all kernels into Triton's cache, by running each once."""
    jobs = {}
    for kind in kinds:
        for n, k in SHAPES.values():
            for rows in ROWS:
                for tile in [linear_8bit.tile_8bit(kind, n, k, rows), *candidates(rows)]:
                    division = divide(rows, n, k, tile, 132)[-2:] if tile.split == SHARES else ()
                    if tile != linear_8bit.TORCH:
                        jobs[kind, k, key_of(tile, k), division] = (kind, n, k, rows, tile)
    for kind, n, k, rows, tile in sorted(jobs.values())[part::PROCESSES]:
        codes, scale, w, w_scale = operands(rows, n, k, kind)
        try:
            linear_8bit.linear_8bit(codes, scale, w, w_scale, None, torch.bfloat16, tile=tile)
            torch.cuda.synchronize()
        except Exception as error:  # the timing says so again, and goes on without it
            print(f"{kind} {tile}: {type(error).__name__}: {str(error)[:120]}", flush=True)


def compile_all(kinds: list[str]) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_part, args=(kinds, part)) for part in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def measure(case: Case, rows: int) -> dict[str, object]:
    """Microseconds of the table's tile and of each candidate that is right."""
    old = linear_8bit.tile_8bit(case.kind, case.n, case.k, rows)
    found: list[tuple[float, Tile]] = []
    for tile in [old, *candidates(rows)]:
        try:
            error = case.check(rows, tile)
        except Exception as failure:  # a tile that does not compile here: said, and the others are timed
            print(
                f"  {case.kind} {case.n}x{case.k} {rows} {tuple(tile)}: {type(failure).__name__}: {str(failure)[:120]}"
            )
            continue
        if not error < LIMITS[case.kind]:
            print(f"  WRONG {case.kind} {case.n}x{case.k} {rows} {tuple(tile)}: relative error {error:.2e}")
            continue
        found.append((case.time(rows, tile), tile))
    others = [item for item in found if item[1] != old]
    best = min(others) if others else (float("inf"), old)
    before = next((spent for spent, tile in found if tile == old), float("inf"))
    result = {"kind": case.kind, "n": case.n, "k": case.k, "rows": rows, "old": before, "new": best[0]}
    return result | {"tile": list(best[1]), "all": [[round(spent, 2), *tile] for spent, tile in found]}


def print_table(results: list[dict[str, object]]) -> None:
    for kind in dict.fromkeys(str(r["kind"]) for r in results):
        for rows in ROWS:
            of = [r for r in results if r["kind"] == kind and r["rows"] == rows]
            old, new = (sum(float(str(r[which])) for r in of) for which in ("old", "new"))
            best = sum(min(float(str(r["old"])), float(str(r["new"]))) for r in of)
            parts = ", ".join(f"{r['old']:.1f}->{r['new']:.1f} {tuple(r['tile'][:3])}" for r in of)  # type: ignore[index]
            print(f"{kind:5} {rows:4} rows {old:6.1f} -> {new:6.1f}, best of both {best:6.1f} us a layer: {parts}")


def adopt(results: list[dict[str, object]]) -> list[dict[str, object]]:
    """Makes the winners' tiles the ones that products take; the entries for the table."""
    entries = []
    for r in results:
        rows = int(str(r["rows"]))
        if rows <= 256 and float(str(r["new"])) < float(str(r["old"])):
            key = (str(r["kind"]), int(str(r["n"])), int(str(r["k"])), linear_8bit.bucket(rows))
            runtime.tuned_tiles()[key] = Tile(*r["tile"])  # type: ignore[misc]
            entries.append(dict(zip(("kind", "n", "k", "m"), key, strict=True)) | {"tile": r["tile"]})
    linear_8bit.tile_8bit.cache_clear()
    return entries


def compare_stacks(kinds: list[str], results: list[dict[str, object]]) -> list[dict[str, object]]:
    """Microseconds a layer of whole stacks, before and after the winners are adopted."""
    stacks = {(kind, rows): Stack(kind, rows) for kind in kinds for rows in STACK_ROWS}
    compile_ahead(lambda: [stack.run() for stack in stacks.values()])
    before = {key: milliseconds(graph_of(stack)) * 1e3 / LAYERS for key, stack in stacks.items()}
    entries = adopt(results)
    for key, stack in stacks.items():
        after = milliseconds(graph_of(stack)) * 1e3 / LAYERS
        runtime.dependent_launch = False
        shares = ", ".join(f"{name} {spent:.1f}" for name, spent in kernel_times(graph_of(stack))[:7])
        runtime.dependent_launch = True
        print(f"stack {key[0]} {key[1]} rows: {before[key]:.1f} -> {after:.1f} us a layer; alone: {shares}", flush=True)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="fp8,w8a8")
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument("--write", action="store_true", help="put winners into the table of this GPU")
    parser.add_argument("--no-stack", action="store_true", help="products only")
    arguments = parser.parse_args()
    start = time.monotonic()
    kinds = [kind for kind in arguments.kinds.split(",") if kind in KINDS]
    results: list[dict[str, object]] = []
    compile_all(kinds)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    for kind in kinds:
        for shape in SHAPES.values():
            case = Case(kind, *shape)
            results += [measure(case, rows) for rows in ROWS]
            del case
            torch.cuda.empty_cache()
        print(f"{kind}: {time.monotonic() - start:.0f} s", flush=True)
    print_table(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results) + "\n")
    entries = adopt(results) if arguments.no_stack else compare_stacks(kinds, results)
    if arguments.write:
        print("written:", write(entries))
    print(f"{time.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    main()
