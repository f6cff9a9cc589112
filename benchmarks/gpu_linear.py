"""Times the few-row products of a GPU for the layers of two models, and writes the best sizes as a table.

    python benchmarks/gpu_linear.py TABLE.json [--seconds 100] [--kinds bf16,int4] [--rows 1,8,32,64,256] [--shapes 8B]
    python benchmarks/gpu_linear.py TABLE.json --shapes none     # stacks alone, with the tiles of the table
    python benchmarks/gpu_linear.py --compile      # no GPU: compiles for sm_90 and tells registers and spills

The table goes to `src/octavo/ops/triton/tuned/<GPU>.json`, and keeps what others have put there. Every candidate is
first checked against a float32 product on random input, then timed in a CUDA graph whose launches take different copies
of the weight in turn, so that none is read from a cache. At the end whole stacks of layers with a short KV cache run as
one graph, with products that start early and are prefetched up to one size of a weight or another. Compilation is
spread over processes, which fill Triton's cache on disk.
"""

from __future__ import annotations

import argparse
import functools
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
from torch import Tensor

from octavo import ops
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import WeightScheme
from octavo.ops import reference
from octavo.ops.decoder import DecoderLayer
from octavo.ops.triton import decoder, runtime
from octavo.ops.triton.runtime import Tile
from octavo.ops.triton.weights import TritonCodes, TritonDense, TritonWeight

BANDWIDTH = 4.3e12  # bytes a second, a large copy on an H200
SPREAD = 160e6  # bytes of weights that a graph goes through at least
GROUP = 128
CUDA = torch.device("cuda")


class Model(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int


MODELS = {"8B": Model(32, 4096, 32, 8, 14336, 128256), "0.6B": Model(28, 1024, 16, 8, 3072, 151936)}
HEAD_DIM = 128
# Up to how many bytes of a weight its product starts early, and is prefetched whole: attention leaves the memory idle.
EARLY = ((16_000_000, 0), (16_000_000, 16_000_000), (40_000_000, 40_000_000), (1 << 40, 0), (1 << 40, 40_000_000))
STACKS = (
    ("0.6B", "bf16", 1), ("0.6B", "bf16", 8), ("8B", "bf16", 1), ("8B", "bf16", 8), ("8B", "bf16", 32),
    ("8B", "int4", 1), ("8B", "int4", 8), ("8B", "int4", 32), ("8B", "int4", 256),
)  # fmt: skip
CUBLAS = Tile(0, 0, 0, 0, 0, 0)


class Shape(NamedTuple):
    """A product [n, k] with what is fused to it."""

    name: str
    n: int
    k: int
    norm: bool = False
    gate: str | None = None
    residual: bool = False
    is_float: bool = False

    def at(self, rows: int) -> Shape:
        """What is fused at so many rows; see `decoder.FUSED_ROWS`."""
        return self if rows <= decoder.FUSED_ROWS else self._replace(norm=False, gate=None, residual=False)

    @property
    def width(self) -> int:
        return self.n // 2 if self.gate else self.n


class Job(NamedTuple):
    kind: str
    shape: Shape
    rows: int
    tile: Tile


def shapes(model: str, kind: str) -> list[Shape]:
    m = MODELS[model]
    q = m.heads * HEAD_DIM
    found = [
        Shape(f"{model} qkv", q + 2 * m.kv_heads * HEAD_DIM, m.hidden, norm=True),
        Shape(f"{model} o", m.hidden, q, residual=True),
        Shape(f"{model} gate_up", 2 * m.inner, m.hidden, norm=True, gate="silu"),
        Shape(f"{model} down", m.hidden, m.inner, residual=True),
    ]
    return [*found, Shape(f"{model} head", m.vocabulary, m.hidden, is_float=True)] if kind == "bf16" else found


def candidates(kind: str, shape: Shape, rows: int) -> list[Tile]:
    """Sizes worth trying: programs for every multiprocessor, and enough bytes on their way in each."""
    if rows == 1:
        return one_row_candidates(kind, shape)
    bucket = runtime.bucket(max(rows, 2))
    block_m = min(bucket, 128)
    found = [CUBLAS] if kind == "bf16" or rows > 64 else []
    sizes = {"bf16": [(64, 128, 5), (32, 256, 4), (64, 64, 4), (128, 64, 5)], "int8": [(64, 128, 6), (32, 128, 8)]}
    sizes["int4"] = [(64, 128, 6), (128, 128, 5), (32, 128, 8)]
    for n, k, stages in sizes[kind]:
        if block_m >= 64 and n == 32:
            continue
        stages = 3 if block_m >= 64 else stages
        options = []
        for split in (1, 2, 3, 4, 6, 8):
            programs = -(-shape.width // n) * split * -(-rows // block_m)
            if shape.k >= k * split * 2 and (programs >= 90 or split == 8) and (split == 1 or programs <= 800):
                options.append(Tile(block_m, n, k, split, 8 if n * block_m >= 8192 else 4, stages))
        found += options[:3]
    return found


def one_row_candidates(kind: str, shape: Shape) -> list[Tile]:
    if kind == "int4":  # a thread has four words of each row, and many rows share what x costs
        sizes = [(8, 512, 4), (16, 512, 4), (4, 512, 4), (8, 256, 2), (16, 256, 2), (4, 256, 2), (8, 128, 1)]
        sizes = [(n, k, w) for n, k, w in sizes if k <= shape.k // 8 and not (shape.gate and n == 16)]
    else:
        sizes = [(2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (4, 512, 2), (8, 512, 2), (16, 512, 4), (4, 2048, 8)]
        sizes = [size for size in sizes if size[1] <= 2 * shape.k]
    return [Tile(1, n, k, 1, w, 1) for n, k, w in sizes if shape.width // n >= 64]


def jobs(models: list[str], kinds: list[str], rows: list[int]) -> list[Job]:
    found = []
    for kind in kinds:
        for model in [model for model in models if kind != "int8" or model == "8B"]:
            for shape in shapes(model, kind):
                for m in rows:
                    if m <= (64 if kind == "bf16" else 256) and not (kind == "int8" and m > 32):
                        found += [Job(kind, shape.at(m), m, tile) for tile in candidates(kind, shape.at(m), m)]
    return found


def make_weight(kind: str, n: int, k: int, device: torch.device = CUDA) -> TritonWeight:
    if kind == "bf16":
        return TritonDense(torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5, device)
    bits = int(kind[3:])
    codes = torch.randint(0, 256, (n, k * bits // 8), device=device, dtype=torch.uint8)
    scale = (torch.rand(n, k // GROUP, device=device) + 0.5) * k**-0.5 / (5 if bits == 4 else 74)
    scheme = WeightScheme(bits, "int", True, "group", GROUP, None)
    offset = -8 * scale if bits == 4 else None
    return TritonCodes(
        QuantizedWeight(scheme, (n, k), codes if bits == 4 else codes.view(torch.int8), scale, offset), device
    )


def parts_of(shape: Shape, rows: int) -> dict[str, Any]:
    """The arguments of `few_rows` that a layer gives for this product."""
    random = torch.randn(rows, shape.width, device=CUDA, dtype=torch.bfloat16)
    return {
        "out_dtype": torch.float32 if shape.is_float else torch.bfloat16,
        "norm": torch.rand(shape.k, device=CUDA).bfloat16() + 0.5 if shape.norm else None,
        "eps": 1e-6,
        "gate": shape.gate,
        "residual": random if shape.residual else None,
    }


def expected(x: Tensor, weight: Tensor, parts: dict[str, Any]) -> Tensor:
    y = x.float()
    if parts["norm"] is not None:
        y = reference.rms_norm(y, parts["norm"], parts["eps"])
    y = F.linear(y, weight.float())
    y = y if parts["gate"] is None else reference.silu_mul(y)
    return y if parts["residual"] is None else y + parts["residual"].float()


def graph_seconds(call: Callable[[], object], repeat: int = 3) -> float:
    """The fastest replay of what `call` launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    best = float("inf")
    for _ in range(repeat + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


@functools.lru_cache(maxsize=1)
def last_weight(kind: str, n: int, k: int) -> TritonWeight:
    """A weight of full size, because whether products start early and prefetch depends on it; kept for the next job."""
    return make_weight(kind, n, k)


def early_of(model: str) -> tuple[tuple[int, int], ...]:
    """The limits that make a difference: all weights of the small model are small."""
    return EARLY if model == "8B" else EARLY[:2]


def set_early(kind: str, rows: int, early: tuple[int, int]) -> None:
    runtime.tuned_early()[kind, runtime.bucket(rows)] = early


def warm_early(job: Job) -> None:
    """Compile a product as the stacks launch it."""
    for early in (*EARLY, (0, 0)):
        set_early(job.kind, job.rows, early)
        warm(job)


def stack_jobs(kinds: list[str], models: list[str]) -> list[Job]:
    """The products of the stacks, with the tiles of the table."""
    return [
        Job(kind, shape.at(m), m, runtime.tile(kind, shape.n, shape.k, m))
        for model, kind, m in STACKS
        if kind in kinds and model in models
        for shape in shapes(model, kind)[:4]
    ]


def warm(job: Job) -> str | None:
    """Compile a candidate into the cache on disk, by running it; what went wrong, or None."""
    kind, shape, rows, tile = job
    if tile == CUBLAS:
        return None
    try:
        x = torch.zeros(rows, shape.k, device=CUDA, dtype=torch.bfloat16)
        last_weight(kind, shape.n, shape.k).few(x, tile=tile, **parts_of(shape, rows))
        torch.cuda.synchronize()
    except Exception as error:  # a size that does not fit is no candidate, which the caller reports
        return f"{type(error).__name__}: {error}"[:200]
    return None


def time_shape(kind: str, shape: Shape, rows: list[int], todo: dict[int, list[Tile]]) -> list[dict[str, Any]]:
    """Lines of the table for one weight; prints what each number of rows took, and F.linear on bf16."""
    weights = [make_weight(kind, shape.n, shape.k)]
    while len(weights) * weights[0].num_bytes < SPREAD and len(weights) < 64:
        weights.append(make_weight(kind, shape.n, shape.k))
    dense = weights[0].dense()
    entries = []
    for m in rows:
        x, parts = torch.randn(m, shape.k, device=CUDA, dtype=torch.bfloat16), parts_of(shape.at(m), m)
        wanted = expected(x, dense, parts)
        timed = []
        for tile in todo.get(m, []):
            error = float((weights[0].few(x, tile=tile, **parts).float() - wanted).norm() / wanted.norm())
            if not error < 8e-3:
                print(f"WRONG: {kind} {shape.name} M={m} {tuple(tile)}: relative error {error:.2e}", flush=True)
                continue
            seconds = graph_seconds(lambda: [w.few(x, tile=tile, **parts) for w in weights])  # noqa: B023
            timed.append((seconds / len(weights), tile))
        if not timed:
            continue
        best, tile = min(timed)
        plain = float("nan")
        if kind == "bf16":
            plain = graph_seconds(lambda: [F.linear(x, w.data) for w in weights]) / len(weights)  # noqa: B023
        rate = weights[0].num_bytes / best
        others = " ".join(f"{tuple(t)[:4]}={s * 1e6:.1f}" for s, t in sorted(timed)[1:4])
        print(
            f"{kind} {shape.name:13} [{shape.n}, {shape.k}] M={m:<3} {best * 1e6:7.1f} us {rate / 1e9:5.0f} GB/s "
            f"{100 * rate / BANDWIDTH:3.0f}%  F.linear {plain * 1e6:6.1f}  {tuple(tile)}  then {others}",
            flush=True,
        )
        entries.append({"kind": kind, "n": shape.n, "k": shape.k, "m": runtime.bucket(m), "tile": list(tile)})
    return entries


def make_stack(model: str, kind: str, rows: int, context: int = 64) -> tuple[Callable[[], tuple[Tensor, Tensor]], int]:
    """A call of a whole stack of layers at a short context, and the bytes of its weights."""
    m = MODELS[model]
    q, kv = m.heads * HEAD_DIM, m.kv_heads
    ones = torch.ones(m.hidden, device=CUDA, dtype=torch.bfloat16)
    head_norm = ones[:HEAD_DIM] if model == "0.6B" else None
    layers = [
        DecoderLayer(
            make_weight(kind, q + 2 * kv * HEAD_DIM, m.hidden),
            make_weight(kind, m.hidden, q),
            make_weight(kind, 2 * m.inner, m.hidden),
            make_weight(kind, m.hidden, m.inner),
            ones, ones, m.heads, kv, HEAD_DIM, 1e-6, HEAD_DIM**-0.5, q_norm=head_norm, k_norm=head_norm,
        )
        for _ in range(m.layers)
    ]  # fmt: skip
    blocks = -(-context // 16)
    size = (rows * blocks + 1, 16, kv, HEAD_DIM, torch.bfloat16, CUDA)
    caches = [ops.KVCache.allocate(*size, interleaved=False) for _ in layers]
    table = torch.arange(1, rows * blocks + 1, device=CUDA, dtype=torch.int32).view(rows, blocks)
    slots = table[:, -1].long() * 16 + (context - 1) % 16
    starts = torch.arange(rows + 1, device=CUDA, dtype=torch.int32)
    lengths = torch.full((rows,), context, device=CUDA, dtype=torch.int32)
    meta = ops.AttentionMetadata(starts, lengths, table, slots.contiguous(), 1, context, rows)
    positions = torch.full((rows,), context - 1, device=CUDA)
    cos_sin = torch.rand(context, HEAD_DIM, device=CUDA)
    x = torch.randn(rows, m.hidden, device=CUDA, dtype=torch.bfloat16)
    fused = decoder.fuse(layers)
    num_bytes = sum(part.num_bytes for layer in layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down))

    def run() -> tuple[Tensor, Tensor]:
        found = fused(x * 1, positions, cos_sin, caches, [meta] * m.layers)
        assert found is not None
        return found

    return run, num_bytes


def time_stack(model: str, kind: str, rows: int) -> dict[str, Any] | None:
    """A stack as one graph, with and without dependent launches.

    For the large model, the line of the table that tells up to which weight products start early and are prefetched.
    """
    layers = MODELS[model].layers
    run, num_bytes = make_stack(model, kind, rows)
    taken = {}
    for early in early_of(model):
        set_early(kind, rows, early)
        taken[early] = graph_seconds(run, 5)
    runtime.dependent_launch = False
    without = graph_seconds(run, 5)
    runtime.dependent_launch = True
    best = min(taken, key=lambda early: taken[early])
    set_early(kind, rows, best)
    other = other_norm_seconds(kind, run) if 1 < rows <= decoder.FUSED_ROWS else float("nan")
    print(
        f"stack {model} {kind} M={rows}: {taken[best] * 1e6 / layers:.1f} us a layer, {taken[best] * 1e3:.3f} ms, "
        f"{100 * num_bytes / BANDWIDTH / taken[best]:.0f}% of the bandwidth; by bytes of weights that start early "
        f"and are prefetched {' '.join(f'{a:.0e}/{b:.0e}={s * 1e6 / layers:.1f}' for (a, b), s in taken.items())}, "
        f"without dependent launch {without * 1e6 / layers:.1f}, norm "
        f"{'in the product' if kind == 'int4' else 'of its own'} {other * 1e6 / layers:.1f}",
        flush=True,
    )
    if model != "8B":
        return None
    return {"kind": kind, "m": runtime.bucket(rows), "dependent_bytes": best[0], "prefetch_bytes": best[1]}


def other_norm_seconds(kind: str, run: Callable[[], object]) -> float:
    """With products that apply the norm where they do not, and the other way round; see `linear.NORMED_ROWS`."""
    from octavo.ops.triton import linear

    usual = linear.NORMED_ROWS[kind]
    linear.NORMED_ROWS[kind] = decoder.FUSED_ROWS if usual == 1 else 1
    seconds = graph_seconds(run, 5)
    linear.NORMED_ROWS[kind] = usual
    return seconds


def write(table: Path, entries: list[dict[str, Any]]) -> None:
    """The table that the package has for this GPU, with these entries instead of its own."""
    path = runtime.tuned_table()
    old = [] if path is None else json.loads(path.read_text())
    merged = {(e["kind"], e.get("n", 0), e.get("k", 0), e["m"]): e for e in [*old, *entries]}
    table.write_text("[\n" + ",\n".join(json.dumps(merged[key]) for key in sorted(merged)) + "\n]\n")


def measure(arguments: argparse.Namespace) -> None:
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        measure_with(pool, arguments)


def measure_with(pool: ProcessPoolExecutor, arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    kinds, rows = arguments.kinds.split(","), [int(m) for m in arguments.rows.split(",")]
    models = [model for model in MODELS if model in arguments.shapes.split(",")]
    todo = jobs(models, kinds, rows)
    failures = list(pool.map(warm, todo, chunksize=4))
    for job, failure in zip(todo, failures, strict=True):
        if failure:
            print("left out:", job.kind, job.shape.name, job.rows, tuple(job.tile), failure)
    print(f"compiled {len(todo)} candidates in {time.monotonic() - began:.0f} s", flush=True)
    good = [job for job, failure in zip(todo, failures, strict=True) if not failure]
    entries: list[dict[str, Any]] = []
    weights = [(kind, shape) for kind in kinds for model in models for shape in shapes(model, kind)]
    for kind, shape in weights:
        if time.monotonic() - began > arguments.seconds - 30:
            print(f"no time left for {kind} {shape.name}")
            continue
        tiles = {m: [j.tile for j in good if j[:3] == (kind, shape.at(m), m)] for m in rows}
        if any(tiles.values()):
            entries += time_shape(kind, shape, rows, tiles)
            write(arguments.table, entries)
    write(arguments.table, entries)
    runtime.tuned_tiles().update(runtime.read_tiles(arguments.table))
    runtime.tile.cache_clear()
    stacked = models or list(MODELS)
    list(pool.map(warm_early, stack_jobs(kinds, stacked)))
    for model, kind, m in STACKS:
        if kind in kinds and model in stacked and time.monotonic() - began < arguments.seconds:
            line = time_stack(model, kind, m)
            entries += [] if line is None else [line]
            write(arguments.table, entries)
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - began:.0f} s in all")


def compile_all() -> None:
    """Every candidate for sm_90, and the default sizes: registers, stack (spills) and shared memory."""
    from triton.backends import nvidia

    disassembler = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    seen = set()
    for kind in ("bf16", "int4", "int8"):
        for model in MODELS:
            for shape in shapes(model, kind):
                for m in (1, 8, 32, 64, 256):
                    default = runtime.default_tile(kind, shape.n, shape.k, runtime.bucket(m))
                    for tile in (default, *candidates(kind, shape.at(m), m)):
                        if tile != CUBLAS and m <= (64 if kind == "bf16" else 256):
                            seen.add((kind, shape.at(m)._replace(name="", n=256), min(m, tile.rows), tile))
    for job in sorted(seen, key=str):
        cubin, shared = compile_one(Job(*job))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            usage = subprocess.run([disassembler, "--dump-resource-usage", file.name], capture_output=True, text=True)
        registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage.stdout)[0])
        mark = "SPILLS" if stack else "TOO LARGE" if shared > 227 * 1024 else ""
        print(
            job[0],
            f"K={job[1].k}",
            job[1].gate,
            tuple(job[3]),
            registers,
            "registers,",
            shared,
            "bytes",
            mark,
            flush=True,
        )


def compile_one(job: Job) -> tuple[bytes, int]:
    """The machine code and shared memory of a candidate."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from octavo.ops.triton import linear

    kind, shape, _, tile = job
    kernel = linear.few_rows_kernel
    if tile.rows == 1:
        kernel = linear.gemv_codes_kernel if kind == "int4" else linear.gemv_kernel
    groups = 1 if kind == "bf16" else shape.k // GROUP
    block_k, split, lines, span = linear._plan(tile, kind, shape.k, GROUP, groups)
    pointers = {"x": "bf16", "w": {"bf16": "bf16", "int4": "i32", "int8": "i8"}[kind], "out": "bf16"}
    pointers |= {"scale": "fp32"} if kind != "bf16" else {}
    pointers |= {"norm": "bf16"} if shape.norm else {}
    pointers |= {"residual": "bf16"} if shape.residual else {}
    pointers |= {"partial": "fp32", "counters": "i32"} if split > 1 else {}
    constants: dict[str, Any] = {"K": shape.k, "GROUPS": groups, "KIND": kind, "GATE": shape.gate}
    constants |= {"BLOCK_N": tile.n, "BLOCK_K": block_k, "PDL": True, "NATIVE": True}
    constants |= {"BLOCK_M": tile.rows, "SPLIT": split, "LINES": lines, "SPAN": span}
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
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["cubin"], compiled.metadata.shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", type=Path, default=Path("gpu_linear.json"))
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--kinds", default="bf16,int4")
    parser.add_argument("--rows", default="1,8,32,64,256")
    parser.add_argument("--shapes", default="8B,0.6B", help="models whose products are timed, or none")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    if arguments.compile:
        compile_all()
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
