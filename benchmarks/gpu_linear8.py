"""8-bit products and elementwise kernels on a GPU: checked against exact sums, timed beside torch, best tiles written.

    python benchmarks/gpu_linear8.py [--write] [--kinds w8a8,fp8] [--seconds 140]

Shapes are those of Llama-3.1-8B. Few rows are timed in a CUDA graph over weights that do not fit the second-level
cache together; many rows one call after another. Kernels are compiled by many processes first. `--write` puts the best
tiles into the table that `octavo.ops.triton.runtime` reads; entries of other kinds stay. Once `--seconds` are over,
only the default tiles are still timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops import reference
from octavo.ops.triton import elementwise, linear_8bit, quantize, runtime
from octavo.ops.triton.runtime import Tile
from octavo.ops.triton.weights_8bit import scaled_mm

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 8, 32, 64, 128, 256, 1024, 8192)
KINDS = {"w8a8": "int8", "fp8": "fp8"}
IN_GRAPH = 256  # from here down, a graph over several copies of the weight
CACHE_BYTES = 240 << 20
PROCESSES = 14
LIMITS = {"w8a8": 3e-3, "fp8": 1e-2}  # rounding to bfloat16 makes 1.7e-3, short sums of FP8 products some more


def candidates(n: int, k: int, m: int) -> list[Tile]:
    """The default tile and some around it."""
    default = linear_8bit.default_tile(n, k, next(rows for rows in linear_8bit.BUCKETS if m <= rows))
    found = [default]
    if m <= 128:
        rows = default.rows
        blocks = (
            [(64, 256, 4, 4), (64, 128, 4, 6), (128, 128, 4, 4)] if rows <= 32 else [(64, 128, 4, 4), (128, 128, 8, 4)]
        )
        for block_n, block_k, warps, stages in blocks:
            for programs in (132, 264, 528):
                split = max(1, min(programs * block_n // n, k // (2 * block_k)))
                found.append(Tile(rows, block_n, block_k, split, warps, stages))
    if m >= 128:
        found += [Tile(128, 128, 128, 0, 8, 4), Tile(128, 128, 128, 0, 4, 4), Tile(128, 256, 128, 0, 8, 3)]
        found += [Tile(64, 128, 128, 0, 4, 4), Tile(128, 64, 128, 0, 4, 5), Tile(64, 256, 128, 0, 4, 4)]
    if m >= 1024:
        found = [tile for tile in found if tile.rows * tile.n >= 1 << 14] + [Tile(256, 128, 128, 0, 8, 3)]
    fits = [t for t in found if (t.rows + t.n) * t.k * t.stages <= 200 << 10]
    return list({linear_8bit._parts(k, t.k, t.split) + t[:2] + t[4:] if t.split else t: t for t in fits}.values())


def operands(m: int, n: int, k: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of random rows and of a random weight."""
    torch.manual_seed(n + k)
    w, w_scale = reference.quantize_rows(torch.randn(n, k, device="cuda") / k**0.5, KINDS[kind])
    codes, scale = reference.quantize_rows(torch.randn(m, k, device="cuda"), KINDS[kind])
    return codes, scale, w, w_scale.flatten()


def compile_part(kinds: list[str], part: int) -> None:
    """Compile one part of all kernels into Triton's cache, by running each once."""
    seen = set()
    for kind in kinds:
        for n, k in SHAPES.values():
            for m in ROWS:
                for tile in candidates(n, k, m):
                    parts = linear_8bit._parts(k, tile.k, tile.split) if tile.split else ()
                    seen.add((kind, k, parts, tile if not tile.split else tile._replace(split=parts[1])))
    for kind, k, _, tile in sorted(seen)[part::PROCESSES]:
        codes, scale, w, w_scale = operands(16, 256, k, kind)
        try:
            linear_8bit.linear_8bit(codes, scale, w, w_scale, None, torch.bfloat16, tile=tile)
            torch.cuda.synchronize()
        except Exception as error:  # the timing says so again, and goes on without it
            print(f"{kind} {tile}: {type(error).__name__}: {error}", flush=True)


def compile_all(kinds: list[str]) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_part, args=(kinds, part)) for part in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def microseconds(call: Callable[[int], object], copies: int, in_graph: bool) -> float:
    """The best of several runs over all copies, per call."""
    for copy in range(min(copies, 2)):
        call(copy)
    torch.cuda.synchronize()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for copy in range(copies):
                call(copy)
        run, calls, repeats = graph.replay, copies, 8
    else:

        def run() -> None:
            for copy in range(copies):
                call(copy)

        calls, repeats = copies, 3
    run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return min(times)


class Case:
    """One shape and kind: operands, exact result, and copies of the weight."""

    def __init__(self, kind: str, n: int, k: int) -> None:
        self.kind, self.n, self.k = kind, n, k
        self.codes, self.scale, self.w, self.w_scale = operands(max(ROWS), n, k, kind)
        self.copies = [self.w, *(self.w.clone() for _ in range(CACHE_BYTES // (n * k)))]
        self.columns = torch.arange(0, n, max(1, n // 1024), device="cuda")
        rows = self.codes.float().double() * self.scale
        weight = (
            self.w.view(torch.uint8)[self.columns].view(self.w.dtype).float().double()
            * self.w_scale[self.columns, None]
        )
        self.exact = rows @ weight.T
        self.bf16 = torch.randn(n, k, device="cuda").bfloat16()

    def check(self, m: int, tile: Tile) -> float:
        """Relative error against float64, on a thousand columns."""
        y = linear_8bit.linear_8bit(
            self.codes[:m], self.scale[:m], self.w, self.w_scale, None, torch.bfloat16, tile=tile
        )
        exact = self.exact[:m]
        return float((y[:, self.columns].double() - exact).norm() / exact.norm())

    def time(self, m: int, tile: Tile) -> float:
        codes, scale = self.codes[:m], self.scale[:m]

        def call(copy: int) -> Tensor:
            w = self.copies[copy % len(self.copies)]
            return linear_8bit.linear_8bit(codes, scale, w, self.w_scale, None, torch.bfloat16, tile=tile)

        return microseconds(call, self.calls(m), m <= IN_GRAPH)

    def calls(self, m: int) -> int:
        return max(len(self.copies), 6) if m <= IN_GRAPH else 5

    def time_torch(self, m: int) -> float:
        """torch's product with its epilogue; rows are padded to what it takes."""
        codes, scale = self.codes[: max(m, 32)], self.scale[: max(m, 32)]

        def call(copy: int) -> Tensor:
            w = self.copies[copy % len(self.copies)]
            if self.kind == "fp8":
                return scaled_mm(codes, scale, w, self.w_scale, None)
            return (torch._int_mm(codes, w.t()) * scale * self.w_scale).to(torch.bfloat16)

        return microseconds(call, self.calls(m), m <= IN_GRAPH)

    def time_bf16(self, m: int) -> float:
        x = torch.randn(m, self.k, device="cuda").bfloat16()
        copies = [self.bf16, *(self.bf16.clone() for _ in range(CACHE_BYTES // (2 * self.n * self.k)))]
        return microseconds(lambda copy: F.linear(x, copies[copy % len(copies)]), self.calls(m), m <= IN_GRAPH)


def measure(kind: str, name: str, deadline: float) -> list[dict[str, object]]:
    """Prints a line for each number of rows; the best tiles as entries of the table."""
    n, k = SHAPES[name]
    case = Case(kind, n, k)
    entries = []
    for m in ROWS:
        best: tuple[float, Tile, float] | None = None
        tiles = candidates(n, k, m)
        for tile in tiles if time.monotonic() < deadline else tiles[:1]:
            try:
                error = case.check(m, tile)
            except Exception as failure:  # a tile that does not compile here: said, and the others are timed
                print(f"  {kind} {name} {m} {tuple(tile)}: {type(failure).__name__}: {str(failure)[:120]}")
                continue
            if not error < LIMITS[kind]:
                print(f"  WRONG {kind} {name} {m} {tuple(tile)}: relative error {error:.2e}")
                continue
            spent = case.time(m, tile)
            if best is None or spent < best[0]:
                best = (spent, tile, error)
        if best is None:
            continue
        spent, tile, error = best
        rate = f"{n * k / spent / 1e6:5.2f} TB/s" if m <= 64 else f"{2 * m * n * k / spent / 1e6:5.0f} TOP/s"
        print(
            f"{kind:5} {name:8} {m:5} {spent:8.1f} us {rate}  torch {case.time_torch(m):8.1f} us  "
            f"bf16 {case.time_bf16(m):8.1f} us  {tuple(tile)}  error {error:.1e}",
            flush=True,
        )
        if m > 1:
            bucket = next(rows for rows in linear_8bit.BUCKETS if m <= rows)
            entries.append({"kind": kind, "n": n, "k": k, "m": bucket, "tile": list(tile)})
    return entries


def check_elementwise(x: Tensor, wide: Tensor, weight: Tensor) -> None:
    """Against the reference, and the fused rounding bit by bit."""
    plain = elementwise.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(plain, reference.rms_norm(x, weight, 1e-5), rtol=8e-3, atol=1e-3)
    torch.testing.assert_close(elementwise.silu_mul(wide), reference.silu_mul(wide), rtol=8e-3, atol=1e-3)
    for kind in ("int8", "fp8"):
        pairs = [(elementwise.add_rms_norm_quant(x, None, weight, 1e-5, kind), plain)]
        pairs.append((elementwise.silu_mul_quant(wide, kind), elementwise.silu_mul(wide)))
        for (codes, scale), value in pairs:
            wanted, wanted_scale = reference.quantize_rows(value, kind)
            different = int((codes.view(torch.uint8) != wanted.view(torch.uint8)).sum() + (scale != wanted_scale).sum())
            if different:
                print(f"  WRONG {kind}: {different} of {codes.numel()} codes and scales differ from the reference")


def measure_elementwise(rows: int) -> None:
    """Checks, then prints the time and the bytes a second of each row kernel."""
    x, residual = (torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(2))
    wide = torch.randn(rows, 28672, device="cuda").bfloat16()
    weight = torch.randn(4096, device="cuda").bfloat16()
    check_elementwise(x, wide, weight)
    norm_quant, gate_quant = elementwise.add_rms_norm_quant, elementwise.silu_mul_quant
    calls: list[tuple[str, Callable[[], object], int]] = [
        ("rms_norm", lambda: elementwise.rms_norm(x, weight, 1e-5), 4 * x.numel()),
        ("add_rms_norm", lambda: elementwise.add_rms_norm(x, residual, weight, 1e-5), 8 * x.numel()),
        ("add_rms_norm int8", lambda: norm_quant(x, residual, weight, 1e-5, "int8"), 7 * x.numel()),
        ("add_rms_norm fp8", lambda: norm_quant(x, residual, weight, 1e-5, "fp8"), 7 * x.numel()),
        ("silu_mul", lambda: elementwise.silu_mul(wide), 3 * wide.numel()),
        ("silu_mul int8", lambda: gate_quant(wide, "int8"), 5 * wide.numel() // 2),
        ("silu_mul fp8", lambda: gate_quant(wide, "fp8"), 5 * wide.numel() // 2),
        ("quantize int8", lambda: quantize.quantize_rows(x, "int8"), 3 * x.numel()),
        ("torch silu_mul", lambda: F.silu(wide[:, :14336]) * wide[:, 14336:], 3 * wide.numel()),
    ]
    for name, call, num_bytes in calls:
        spent = microseconds(lambda _, call=call: call(), 20, True)  # type: ignore[misc]
        print(f"{name:18} {rows:5} rows {spent:8.2f} us {num_bytes / spent / 1e6:6.2f} TB/s")


def write(entries: list[dict[str, object]]) -> Path:
    """Merges the entries into the table of this GPU."""
    path = Path(runtime.__file__).parent / "tuned" / f"{torch.cuda.get_device_name().replace(' ', '_')}.json"
    path.parent.mkdir(exist_ok=True)
    kept = json.loads(path.read_text()) if path.is_file() else []
    table = {(e["kind"], e["n"], e["k"], e["m"]): e for e in [*kept, *entries]}
    lines = [json.dumps(table[key]) for key in sorted(table)]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the best tiles into the table of this GPU")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds to measure")
    parser.add_argument("--seconds", type=float, default=140, help="time after which only default tiles are timed")
    arguments = parser.parse_args()
    start = time.monotonic()
    kinds = arguments.kinds.split(",")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for rows in (1, 256, 8192):
        measure_elementwise(rows)
    compile_all(kinds)
    print(f"compiled after {time.monotonic() - start:.0f} s")
    entries = []
    for kind in kinds:
        for name in SHAPES:
            entries += measure(kind, name, start + arguments.seconds - 15)
    if arguments.write:
        print("written:", write(entries))
    print(f"{time.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    main()
