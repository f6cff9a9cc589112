"""A whole stack of 8-bit layers of Llama-3.1-8B at a short context, as one CUDA graph; the share of each kernel.

    python benchmarks/gpu_stack8.py [--kinds w8a8,fp8] [--rows 1,8,32]

Prints the time a layer, with and without dependent launches, and the time of each kernel without them.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from octavo import ops
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.ops.decoder import DecoderLayer
from octavo.ops.triton import decoder, runtime, weights_8bit

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 4096, 14336, 32, 8, 128
BANDWIDTH = 4.3e12  # bytes a second that a copy reaches on an H200
CUDA = torch.device("cuda")


def make_weight(kind: str, n: int, k: int) -> weights_8bit.Triton8Bit:
    """Random codes with scales that keep sums near one."""
    of = "int" if kind == "w8a8" else "float"
    if of == "int":
        codes = torch.randint(-127, 128, (n, k), device=CUDA, dtype=torch.int8)
    else:
        codes = (torch.randn(n, k, device=CUDA) * 73).to(torch.float8_e4m3fn)
    scale = torch.full((n, 1), 1 / (73 * k**0.5), device=CUDA)
    scheme = WeightScheme(8, of, True, "channel", None, ActivationScheme(type=of))
    return weights_8bit.pack(QuantizedWeight(scheme, (n, k), codes, scale), torch.bfloat16, CUDA)


class Stack:
    """Layers of one kind, and what a step of `rows` decodes at `context` tokens needs."""

    def __init__(self, kind: str, rows: int, context: int = 64) -> None:
        ones = torch.ones(HIDDEN, device=CUDA, dtype=torch.bfloat16)
        sizes = [((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
        self.layers = [
            DecoderLayer(
                *(make_weight(kind, *size) for size in sizes),
                ones, ones, HEADS, KV_HEADS, HEAD_DIM, 1e-5, HEAD_DIM**-0.5,
            )
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.num_bytes = LAYERS * sum(n * k for n, k in sizes)
        blocks = -(-context // 16)
        size = (rows * blocks + 1, 16, KV_HEADS, HEAD_DIM, torch.bfloat16, CUDA)
        self.caches = [ops.KVCache.allocate(*size, interleaved=False) for _ in self.layers]
        table = torch.arange(1, rows * blocks + 1, device=CUDA, dtype=torch.int32).view(rows, blocks)
        slots = (table[:, -1].long() * 16 + (context - 1) % 16).contiguous()
        starts = torch.arange(rows + 1, device=CUDA, dtype=torch.int32)
        lengths = torch.full((rows,), context, device=CUDA, dtype=torch.int32)
        self.meta = ops.AttentionMetadata(starts, lengths, table, slots, 1, context, rows)
        self.positions = torch.full((rows,), context - 1, device=CUDA)
        self.cos_sin = torch.rand(context, HEAD_DIM, device=CUDA)
        self.x = torch.randn(rows, HIDDEN, device=CUDA, dtype=torch.bfloat16)
        self.fused = decoder.fuse(self.layers)

    def run(self) -> tuple[Tensor, Tensor]:
        found = self.fused(self.x * 1, self.positions, self.cos_sin, self.caches, [self.meta] * LAYERS)
        assert found is not None
        return found


def graph_of(stack: Stack) -> torch.cuda.CUDAGraph:
    stack.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stack.run()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """The best of ten replays."""
    graph.replay()
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def kernel_times(graph: torch.cuda.CUDAGraph) -> list[tuple[str, float]]:
    """(kernel, microseconds a layer), the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    found = [(event.key[:40], event.self_device_time_total / LAYERS) for event in profile.key_averages()]
    return sorted((item for item in found if item[1] > 0), key=lambda item: -item[1])


def time_stack(kind: str, rows: int) -> None:
    """Prints the times of a stack."""
    stack = Stack(kind, rows)
    taken = {}
    for dependent in (True, False):
        runtime.dependent_launch = dependent
        graph = graph_of(stack)
        taken[dependent] = milliseconds(graph)
    runtime.dependent_launch = True
    share = 100 * stack.num_bytes / BANDWIDTH / (taken[True] / 1e3)
    print(
        f"stack 8B {kind} M={rows}: {taken[True] * 1e3 / LAYERS:.1f} us a layer, {taken[True]:.3f} ms, {share:.0f}% of "
        f"the bandwidth; without dependent launch {taken[False] * 1e3 / LAYERS:.1f} us a layer",
        flush=True,
    )
    print("   " + ", ".join(f"{name} {spent:.1f} us" for name, spent in kernel_times(graph)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="w8a8,fp8")
    parser.add_argument("--rows", default="1,8,32")
    arguments = parser.parse_args()
    for kind in arguments.kinds.split(","):
        for rows in map(int, arguments.rows.split(",")):
            time_stack(kind, rows)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
