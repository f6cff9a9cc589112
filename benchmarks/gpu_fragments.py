"""Times 4-bit products in fragment order beside the kernels in use and cuBLAS: the four products of an 8B layer.

    python benchmarks/gpu_fragments.py OUT.json [--rows 1,2,4,8,16,32,64,128,256] [--seconds 70]
    python benchmarks/gpu_fragments.py --compile       # no GPU: registers, spills and instructions of each candidate

Each candidate is checked against a float32 product first. bf16 is F.linear alone, without norm, gate or residual.
Up to 16 rows the 4-bit products have theirs; beyond, a layer runs them as kernels of their own.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_linear import CUDA, GROUP, SPREAD, Shape, expected, graph_seconds, make_weight, parts_of, shapes
from torch import Tensor

from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import WeightScheme
from octavo.ops.triton.runtime import Tile
from octavo.ops.triton.weights_fragments import TritonFragments

MOST_ERROR = 8e-3  # of a result rounded to bf16


class Job(NamedTuple):
    shape: Shape
    rows: int
    tile: Tile


def make_fragments(n: int, k: int) -> TritonFragments:
    codes = torch.randint(0, 256, (n, k // 2), device=CUDA, dtype=torch.uint8)
    scale = ((torch.rand(n, k // GROUP, device=CUDA) + 0.5) * k**-0.5 / 5).bfloat16()
    scheme = WeightScheme(4, "int", True, "group", GROUP, None)
    return TritonFragments(QuantizedWeight(scheme, (n, k), codes, scale, -8 * scale), CUDA)


def candidates(shape: Shape, rows: int) -> list[Tile]:
    """Two warps take the older matrix instruction of 16 rows, four or more that of 64, but for 8 rows of x."""
    if rows > 64:
        blocks = -(-rows // 128)
        return [Tile(128, 128, 128, programs, 8, 3) for programs in (132 // blocks, 132)[: min(2, blocks)]]
    block = next(size for size in (8, 16, 32, 64) if rows <= size)
    if block == 64:
        return [Tile(64, 64, 128, 264, 4, 3), Tile(64, 128, 128, 132, 8, 3)]
    found = [Tile(block, 64, 128, 264, 4, 6), Tile(block, 64, 128, 396, 4, 5), Tile(block, 32, 128, 528, 2, 6)]
    return found if shape.gate and block > 16 else [*found, Tile(block, 128, 128, 264, 4, 5)]


def jobs(rows: list[int]) -> list[Job]:
    return [
        Job(shape.at(m), m, tile) for shape in shapes("8B", "int4") for m in rows for tile in candidates(shape.at(m), m)
    ]


def warm(job: Job) -> str | None:
    """Compile a candidate into Triton's cache by running it; what went wrong, or None."""
    try:
        x = torch.zeros(job.rows, job.shape.k, device=CUDA, dtype=torch.bfloat16)
        make_fragments(job.shape.n, job.shape.k).few(x, tile=job.tile, **parts_of(job.shape, job.rows))
        torch.cuda.synchronize()
    except Exception as error:  # a size that does not fit is no candidate, which the caller reports
        return f"{type(error).__name__}: {error}"[:160]
    return None


def copies(make: Callable[[], Any], num_bytes: Callable[[Any], int]) -> list[Any]:
    """As many weights as no cache holds."""
    found = [make()]
    while len(found) * num_bytes(found[0]) < SPREAD:
        found.append(make())
    return found


def per_weight(weights: list[Any], call: Callable[[Any], object]) -> float:
    """Microseconds of one call when the weights take turns."""
    return 1e6 * graph_seconds(lambda: [call(weight) for weight in weights]) / len(weights)


def error_of(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.float() - wanted).norm() / wanted.norm())


def time_shape(shape: Shape, rows: list[int], tiles: dict[int, list[Tile]]) -> list[dict[str, Any]]:
    """What each number of rows took: kernels in use, cuBLAS, and each candidate."""
    new = copies(lambda: make_fragments(shape.n, shape.k), lambda w: w.num_bytes)
    old = copies(lambda: make_weight("int4", shape.n, shape.k), lambda w: w.num_bytes)
    plain = copies(lambda: new[0].dense(), lambda w: w.nbytes)
    entries = []
    for m in rows:
        x, parts = torch.randn(m, shape.k, device=CUDA, dtype=torch.bfloat16), parts_of(shape.at(m), m)
        wanted = expected(x, plain[0], parts)
        taken = {}
        for tile in tiles[m]:
            error = error_of(new[0].few(x, tile=tile, **parts), wanted)
            if error < MOST_ERROR:
                taken[str(tuple(tile))] = per_weight(new, lambda w: w.few(x, tile=tile, **parts))  # noqa: B023
            else:
                print(f"WRONG: {shape.name} M={m} {tuple(tile)}: relative error {error:.2e}", flush=True)
        entry = {"shape": shape.name, "m": m, "fragments": taken}
        entry["old"] = per_weight(old, lambda w: w.few(x, **parts))  # noqa: B023
        entry["bf16"] = per_weight(plain, lambda w: F.linear(x, w))  # noqa: B023
        entries.append(entry)
        ranked = " ".join(f"{tile.replace(' ', '')}={us:.1f}" for tile, us in sorted(taken.items(), key=lambda t: t[1]))
        print(f"{shape.name:11} M={m:<3} old {entry['old']:6.1f} bf16 {entry['bf16']:6.1f} new {ranked}", flush=True)
    return entries


def print_layers(entries: list[dict[str, Any]], rows: list[int]) -> None:
    print("us a layer:  rows    old    new   bf16")
    for m in rows:
        found = [e for e in entries if e["m"] == m and e["fragments"]]
        if len(found) == 4:
            best = sum(min(e["fragments"].values()) for e in found)
            print(
                f"           {m:6} {sum(e['old'] for e in found):6.1f} {best:6.1f} {sum(e['bf16'] for e in found):6.1f}"
            )


def measure(arguments: argparse.Namespace, rows: list[int]) -> None:
    began = time.monotonic()
    todo = jobs(rows)
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        failures = dict(zip(todo, pool.map(warm, todo, chunksize=2), strict=True))
    for job, failure in failures.items():
        if failure:
            print("left out:", job.shape.name, job.rows, tuple(job.tile), failure)
    print(f"compiled {len(todo)} candidates in {time.monotonic() - began:.0f} s", flush=True)
    entries: list[dict[str, Any]] = []
    for shape in shapes("8B", "int4"):
        if time.monotonic() - began > arguments.seconds:
            print(f"no time left for {shape.name}")
            continue
        tiles = {m: [j.tile for j in todo if j[:2] == (shape.at(m), m) and not failures[j]] for m in rows}
        entries += time_shape(shape, rows, tiles)
        arguments.out.write_text(json.dumps(entries, indent=1) + "\n")
    print_layers(entries, rows)
    print(f"{time.monotonic() - began:.0f} s in all")


def compile_one(job: Job) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from octavo.ops.triton.linear_fragments import fragments_kernel as kernel

    shape, rows, tile = job
    pointers = dict.fromkeys(("x", "out"), "bf16") | dict.fromkeys(("scale", "partial"), "fp32")
    pointers |= dict.fromkeys(("w", "counters"), "i32")
    pointers |= {"norm": "bf16"} if shape.norm and rows == 1 else {}
    pointers |= {"residual": "bf16"} if shape.residual else {}
    constants = {"K": shape.k, "GROUPS": shape.k // GROUP, "GATE": shape.gate, "BLOCK_M": tile.rows}
    constants |= {"BLOCK_N": tile.n, "WARPS": tile.warps, "PROGRAMS": tile.split, "LINES": 4}
    constants |= {"PDL": True, "NATIVE": True}
    numbers = {"N": "i32", "M": "i32", "eps": "fp32"}
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = f"*{pointers[name]}" if name in pointers else numbers.get(name, "constexpr")
        if signature[name] == "constexpr":
            values[(i,)] = constants.get(name)
        elif name in pointers or name == "N":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_all(rows: list[int]) -> None:
    """Registers, stack (spills), shared memory, and whether codes changed threads before the product."""
    from triton.backends import nvidia

    tools = Path(nvidia.__file__).parent / "bin"
    for job in jobs(rows):
        compiled = compile_one(job)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [tools / "cuobjdump", "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            sass = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True)
        registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
        count = collections.Counter(re.findall(r"\*/\s+(?:@!?U?P\w+ )?\s*(H\w*MMA|HFMA2|HMUL2|STSM)", sass.stdout))
        moved = re.findall(r"convert_layout .*x128xbf16.* -> .*dot_op", compiled.asm["ttgir"])
        mark = "SPILLS" if stack else "TOO LARGE" if compiled.metadata.shared > 227 * 1024 else ""
        size = f"{registers} registers, {compiled.metadata.shared} bytes"
        name = f"{job.shape.name} M={job.rows} {tuple(job.tile)}"
        print(f"{name}: {size}, {dict(count)}, {len(moved)} codes moved {mark}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path("gpu_fragments.json"))
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    rows = [int(m) for m in arguments.rows.split(",")]
    if arguments.compile:
        compile_all(rows)
    else:
        measure(arguments, rows)


if __name__ == "__main__":
    main()
