"""Products of few rows with 4-bit codes on a GPU: the kernel in CUDA C++ beside the Triton one, and its best sizes.

    python benchmarks/gpu_w4.py TABLE.json [--rows 1,8,16,32,64] [--seconds 120] [--shape 8B|0.6B]

Every variant is checked against float32 first. Products of one shape run over copies of the weight that no cache
holds, in a CUDA graph, each launched while the one ahead still runs; then whole layers, kernel against kernel. The
limit is the bytes of codes and scales at 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from octavo.ops.cuda import compiler, linear_w4
from octavo.ops.cuda.linear_w4 import Shape, Sizes
from octavo.ops.triton import runtime
from octavo.ops.triton.weights import TritonCodes, TritonWeight

BANDWIDTH = 4.3e12
GROUP = 128
# rows of W, columns, gate
SHAPES = {
    "8B": [(6144, 4096, None), (4096, 4096, None), (28672, 4096, "silu"), (4096, 14336, None)],
    "0.6B": [(4096, 1024, None), (1024, 2048, None), (6144, 1024, "silu"), (1024, 3072, None)],
}


def random_weight(n: int, k: int) -> TritonCodes:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.rand(n, k // GROUP, device="cuda") / k**0.5
    scheme = SimpleNamespace(num_bits=4, type="int", activations=None)
    weight = SimpleNamespace(shape=(n, k), codes=codes, scale=scale, offset=-8 * scale, scheme=scheme, input_scale=None)
    return TritonCodes(weight, torch.device("cuda"))


def seconds_each(calls: Sequence[Callable[[], Any]], repeats: int = 5) -> float:
    """Of a call, out of a graph of all of them; the median of some replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times[1:])[repeats // 2]


def candidates(shape: Shape) -> list[Sizes]:
    """Tiles a pass, warps and parts of K, with a ring as large as half or all of a multiprocessor's memory allows."""
    found = []
    for mt, kw, parts, room in itertools.product((1, 2, 4), (4, 8, 16), (1, 2, 4), (112 << 10, 226 << 10)):
        sizes = Sizes(mt, kw, 0, min(132 // parts, shape.n // (32 if shape.gated else 16)), parts)
        stages = min((room - shape.shared_bytes(sizes)) // shape.stage_bytes(sizes), 16)
        if stages >= 2 and not (shape.gated and mt == 1) and shape.units_a_part(sizes) >= kw:
            found.append(sizes._replace(stages=stages))
    return list(dict.fromkeys(found))


def compile_all(wanted: set[tuple[Shape, Sizes]]) -> None:
    """Into the cache, side by side."""
    target = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: compiler._cached("few_rows_w4", key[0].macros(key[1], False), target), wanted))


def check(x: Tensor, weight: TritonCodes, gate: str | None, out: Tensor) -> None:
    y = x.float() @ weight.dense().float().T
    if gate is not None:
        first, second = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(first) * second
    error = float((out.float() - y).norm() / y.norm())
    assert error < 0.01, error


def shape_of(rows: int, n: int, k: int, gate: str | None) -> Shape:
    return Shape(rows, n, k // 128, 1, False, gate is not None)


def _product(x: Tensor, gate: str | None, sizes: Sizes, weight: TritonCodes) -> Tensor:
    return linear_w4.few_rows(x, weight, None, torch.bfloat16, None, 0.0, gate, None, True, sizes)


def best_sizes(
    rows: int, shape: tuple[int, int, str | None], weights: list[TritonCodes], budget: float
) -> dict[str, Any]:
    n, k, gate = shape
    x = torch.randn(rows, k, device="cuda").bfloat16()
    triton = seconds_each([functools.partial(TritonWeight.few, weight, x, gate=gate) for weight in weights])
    found: list[tuple[float, Sizes]] = []
    until = time.perf_counter() + budget
    for sizes in candidates(shape_of(rows, n, k, gate)):
        if found and time.perf_counter() > until:
            break
        check(x, weights[0], gate, _product(x, gate, sizes, weights[0]))
        product = functools.partial(_product, x, gate, sizes)
        calls = [functools.partial(product, weight) for weight in weights]
        found.append((seconds_each(calls), sizes))
    found.sort()
    limit = weights[0].num_bytes / BANDWIDTH
    line = f"{rows:3} rows {n:6} x {k:6} {gate or '':5} limit {limit * 1e6:6.1f} us  triton {triton * 1e6:6.1f}"
    for seconds, sizes in found[:3]:
        line += f"  | {seconds * 1e6:6.1f} {tuple(sizes)}"
    print(line, flush=True)
    return {"rows": rows, "n": n, "k": k, "triton_us": triton * 1e6, "limit_us": limit * 1e6,
            "cuda": [(seconds * 1e6, list(sizes)) for seconds, sizes in found[:6]]}  # fmt: skip


def layer_times(rows: int, layers: list[list[TritonCodes]], shapes: Any, chosen: dict[Any, Sizes]) -> dict[str, float]:
    """Microseconds of the four products of a layer: Triton's, with the best sizes of this run, with those by rule."""
    inputs = [torch.randn(rows, k, device="cuda").bfloat16() for _, k, _ in shapes]

    def run(kernel: str) -> float:
        def layer(weights: list[TritonCodes]) -> None:
            for weight, x, (n, k, gate) in zip(weights, inputs, shapes, strict=True):
                if kernel == "triton":
                    TritonWeight.few(weight, x, gate=gate)
                else:
                    processors = runtime.num_multiprocessors(x.device)
                    by_rule = linear_w4.sizes_for(shape_of(rows, n, k, gate), processors)
                    assert by_rule is not None
                    sizes = chosen[rows, n, k] if kernel == "best" else by_rule
                    _product(x, gate, sizes, weight)

        return seconds_each([functools.partial(layer, weights) for weights in layers]) * 1e6

    limit = sum(weight.num_bytes for weight in layers[0]) / BANDWIDTH * 1e6
    return {"rows": rows, "limit": limit} | {kernel: run(kernel) for kernel in ("triton", "best", "by rule")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", type=Path)
    parser.add_argument("--rows", default="1,8,16,32,64")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--shape", default="8B", choices=sorted(SHAPES))
    options = parser.parse_args()
    all_rows, shapes = [int(rows) for rows in options.rows.split(",")], SHAPES[options.shape]
    begin = time.perf_counter()
    layers = [[random_weight(n, k) for n, k, _ in shapes] for _ in range(6 if options.shape == "8B" else 28)]
    problems = [shape_of(rows, *shape) for rows, shape in itertools.product(all_rows, shapes)]
    wanted = {(shape._replace(rows=shape.room), sizes) for shape in problems for sizes in candidates(shape)}
    compile_all(wanted)
    print(f"{len(wanted)} kernels compiled after {time.perf_counter() - begin:.1f} s", flush=True)
    results, chosen = [], {}
    seconds = options.seconds / (len(all_rows) * len(shapes))
    for rows, (i, shape) in itertools.product(all_rows, enumerate(shapes)):
        result = best_sizes(rows, shape, [weights[i] for weights in layers], seconds)
        results.append(result)
        chosen[rows, shape[0], shape[1]] = Sizes(*result["cuda"][0][1])
        options.table.write_text(json.dumps(results))
    for rows in all_rows:
        times = layer_times(rows, layers, shapes, chosen)
        print("layer", {key: round(value, 1) for key, value in times.items()}, flush=True)
        results.append({"layer": times})
    options.table.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
