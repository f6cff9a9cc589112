"""8-bit products and elementwise kernels on a GPU: checked against exact sums, timed beside torch, best tiles written.

    python benchmarks/gpu_linear8.py [--write] [--kinds w8a8,fp8] [--seconds 100]

Shapes are those of Llama-3.1-8B; at the end its stack of layers runs with the best tiles. All is timed in CUDA graphs
over weights that do not fit the second-level cache together. Kernels are compiled by many processes first. `--write`
puts the best tiles into the table that `octavo.ops.triton.runtime` reads; entries of other kinds stay. Once
`--seconds` are over, only the default tiles are still timed.
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
from gpu_stack8 import time_stack
from torch import Tensor

from octavo.ops import reference
from octavo.ops.triton import elementwise, gemv_8bit, linear_8bit, quantize, runtime
from octavo.ops.triton.runtime import Tile

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 8192)
KINDS = {"w8a8": "int8", "fp8": "fp8"}
CACHE_BYTES = 240 << 20
PROCESSES = 14
ASYNC = ((128, 128, 4, 3), (128, 256, 8, 3), (64, 256, 4, 4), (64, 128, 4, 6))  # rows, n, warps, stages
LIMITS = {"w8a8": 3e-3, "fp8": 1e-2}  # rounding to bfloat16 makes 1.7e-3, short sums of FP8 products some more


def candidates(kind: str, n: int, k: int, m: int) -> list[Tile]:
    """The default tile and some around it."""
    default = linear_8bit.default_tile(n, k, linear_8bit.bucket(m))
    found = [default, *(gemv_8bit.candidates(k) if m == 1 else ())]
    if m <= 128:
        rows = max(16, default.rows)
        loads = [(64, 256, 4, 4), (64, 128, 4, 6)] if rows <= 32 else [(64, 128, 4, 4)]
        tensors = [(64, 128, 4, 6), (128, 128, 8, 4)]  # by tensor descriptors
        if rows <= 32:
            tensors = [(64, 128, 4, 6), (64, 128, 4, 10), (64, 256, 4, 4), (128, 128, 4, 4), (128, 128, 4, 6)]
        for sign, block_n, block_k, warps, stages in [(1, *b) for b in loads] + [(-1, *b) for b in tensors]:
            for programs in (132, 264, 528):
                split = max(1, min(programs * block_n // n, k // (2 * block_k)))
                found.append(Tile(rows, block_n, block_k, sign * split, warps, stages))
    if m >= 128:
        found += [Tile(128, 128, 128, 0, 8, 4), Tile(128, 128, 128, 0, 4, 4), Tile(128, 256, 128, 0, 8, 3)]
        found += [Tile(64, 128, 128, 0, 4, 4), Tile(128, 64, 128, 0, 4, 5), Tile(64, 256, 128, 0, 4, 4)]
    if m >= 1024:
        found = [tile for tile in found if tile.rows * tile.n >= 1 << 14] + [Tile(256, 128, 128, 0, 8, 3)]
        found += [Tile(128, 128, 128, 0, 4, 5), Tile(128, 128, 128, 0, 8, 5), Tile(128, 256, 128, 0, 8, 4)]
    if m >= 128:
        found += [linear_8bit.TORCH, linear_8bit.UNSCALED]
    if m >= 128 and kind == "w8a8":
        found += [linear_8bit.async_tile(*sizes) for sizes in ASYNC]
    fits = [t for t in found if t.rows <= 1 or (t.rows + t.n) * t.k * t.stages <= 200 << 10]
    return list({key_of(t, k): t for t in fits}.values())


def key_of(tile: Tile, k: int) -> Tile:
    """The sizes as the kernel gets them for rows of k."""
    if tile.split == 0 or tile == linear_8bit.UNSCALED:
        return tile
    block_k, split = linear_8bit._parts(k, tile.k, abs(tile.split))
    return tile._replace(k=block_k, split=split if tile.split > 0 else -split)


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
                for tile in candidates(kind, n, k, m):
                    seen.add((kind, k, key_of(tile, k)))
    for kind, k, tile in sorted(seen)[part::PROCESSES]:
        if tile in (linear_8bit.TORCH, linear_8bit.UNSCALED):
            continue
        codes, scale, w, w_scale = operands(1 if tile.rows == 1 else 16, 256, k, kind)
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


def microseconds(call: Callable[[int], object], copies: int) -> float:
    """The best of several runs of a graph over all copies, per call."""
    for copy in range(min(copies, 2)):
        call(copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            call(copy)
    graph.replay()
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / copies)
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

        return microseconds(call, self.calls)

    @property
    def calls(self) -> int:
        return max(len(self.copies), 6)

    def time_torch(self, m: int) -> float:
        """torch's product with its epilogue; rows are padded to what it takes."""
        codes, scale = self.codes[: max(m, 32)], self.scale[: max(m, 32)]

        def call(copy: int) -> Tensor:
            w = self.copies[copy % len(self.copies)]
            if self.kind == "fp8":
                return linear_8bit.scaled_mm(codes, scale, w, self.w_scale, None)
            return (torch._int_mm(codes, w.t()) * scale * self.w_scale).to(torch.bfloat16)

        return microseconds(call, self.calls)

    def time_bf16(self, m: int) -> float:
        x = torch.randn(m, self.k, device="cuda").bfloat16()
        copies = [self.bf16, *(self.bf16.clone() for _ in range(CACHE_BYTES // (2 * self.n * self.k)))]
        return microseconds(lambda copy: F.linear(x, copies[copy % len(copies)]), self.calls)


def measure(kind: str, name: str, deadline: float) -> list[dict[str, object]]:
    """Prints a line for each number of rows; the best tiles as entries of the table."""
    n, k = SHAPES[name]
    case = Case(kind, n, k)
    entries = []
    for m in ROWS:
        best: tuple[float, Tile, float] | None = None
        tiles = [tile for tile in candidates(kind, n, k, m) if kind == "fp8" or tile.rows > 0]
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
        entries.append({"kind": kind, "n": n, "k": k, "m": linear_8bit.bucket(m), "tile": list(tile)})
    return entries


def check_elementwise(x: Tensor, wide: Tensor, weight: Tensor) -> None:
    """Against the reference, and the fused rounding bit by bit but for few codes.

    A sum of squares added in another order moves a number of the norm to its neighbour now and then, and its code with
    it; a scale is the largest number's.
    """
    plain = elementwise.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(plain, reference.rms_norm(x, weight, 1e-5), rtol=8e-3, atol=1e-3)
    torch.testing.assert_close(elementwise.silu_mul(wide), reference.silu_mul(wide), rtol=8e-3, atol=1e-3)
    for kind in ("int8", "fp8"):
        norm = elementwise.rms_norm(x.float(), weight, 1e-5)
        pairs = [(elementwise.add_rms_norm_quant(x, None, weight, 1e-5, kind), norm)]
        pairs.append((elementwise.gated_quant(wide, "silu", kind), elementwise.silu_mul(wide.float())))
        for (codes, scale), value in pairs:
            wanted, wanted_scale = reference.quantize_rows(value, kind)
            different = int((codes.view(torch.uint8) != wanted.view(torch.uint8)).sum() + (scale != wanted_scale).sum())
            if different > 1e-6 * codes.numel():
                print(f"  WRONG {kind}: {different} of {codes.numel()} codes and scales differ from the reference")


def measure_elementwise(rows: int) -> None:
    """Checks, then prints the time and the bytes a second of each row kernel."""
    x, residual = (torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(2))
    wide = torch.randn(rows, 28672, device="cuda").bfloat16()
    weight = torch.randn(4096, device="cuda").bfloat16()
    check_elementwise(x, wide, weight)
    norm_quant, gate_quant = elementwise.add_rms_norm_quant, elementwise.gated_quant
    calls: list[tuple[str, Callable[[], object], int]] = [
        ("rms_norm", lambda: elementwise.rms_norm(x, weight, 1e-5), 4 * x.numel()),
        ("add_rms_norm", lambda: elementwise.add_rms_norm(x, residual, weight, 1e-5), 8 * x.numel()),
        ("add_rms_norm int8", lambda: norm_quant(x, residual, weight, 1e-5, "int8"), 7 * x.numel()),
        ("add_rms_norm fp8", lambda: norm_quant(x, residual, weight, 1e-5, "fp8"), 7 * x.numel()),
        ("silu_mul", lambda: elementwise.silu_mul(wide), 3 * wide.numel()),
        ("silu_mul int8", lambda: gate_quant(wide, "silu", "int8"), 5 * wide.numel() // 2),
        ("silu_mul fp8", lambda: gate_quant(wide, "silu", "fp8"), 5 * wide.numel() // 2),
        ("quantize int8", lambda: quantize.quantize_rows(x, "int8"), 3 * x.numel()),
        ("torch silu_mul", lambda: F.silu(wide[:, :14336]) * wide[:, 14336:], 3 * wide.numel()),
    ]
    for name, call, num_bytes in calls:
        spent = microseconds(lambda _, call=call: call(), 20)  # type: ignore[misc]
        print(f"{name:18} {rows:5} rows {spent:8.2f} us {num_bytes / spent / 1e6:6.2f} TB/s")


def write(entries: list[dict[str, object]]) -> Path:
    """Merges the entries into the table of this GPU."""
    path = Path(runtime.__file__).parent / "tuned" / f"{torch.cuda.get_device_name().replace(' ', '_')}.json"
    path.parent.mkdir(exist_ok=True)
    kept = json.loads(path.read_text()) if path.is_file() else []
    table = {(e["kind"], e.get("n", 0), e.get("k", 0), e["m"]): e for e in [*kept, *entries]}
    lines = [json.dumps(table[key]) for key in sorted(table)]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the best tiles into the table of this GPU")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds to measure")
    parser.add_argument("--seconds", type=float, default=100, help="time after which only default tiles are timed")
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
    for entry in entries:
        tile = Tile(*entry["tile"])  # type: ignore[misc]
        runtime.tuned_tiles()[str(entry["kind"]), entry["n"], entry["k"], entry["m"]] = tile  # type: ignore[index]
    linear_8bit.tile_8bit.cache_clear()
    for kind in kinds:
        for rows in (1, 8, 32):
            time_stack(kind, rows)
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    main()
