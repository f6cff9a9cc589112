"""Times every operation on the CPU and sets it beside what the machine allows.

    python benchmarks/ops_cpu.py [--rows 1,8,32,512] [--hidden 576 --inner 1536 --heads 9 --kv-heads 3 --head-dim 64]
                                 [--vocab 49152] [--layers 30] [--threads N] [--json FILE]

The shapes are those of SmolLM2-135M by default. Weights of all layers are packed separately and visited in turn, so
that none is read from a cache that a real decoding step would have emptied. Limits are measured in this run: reading
a large buffer (GB/s) and a large bfloat16 product of torch (GFLOP/s). Each result is compared with the reference.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.ops import reference
from octavo.ops.cpu import library
from octavo.ops.packed_weight import TorchDense, TorchQuantized

BLOCK_SIZE = 16
CPU = torch.device("cpu")


@dataclass
class Row:
    """One line of the table. `limit_percent`: the time that the limits allow, as a share of the time taken."""

    operation: str
    rows: int
    microseconds: float
    gigabytes_per_second: float
    gigaflops: float
    limit_percent: float | None
    error: float | None


@dataclass
class Limits:
    read: float  # bytes a second
    product: float  # floating-point operations a second

    def percent(self, seconds: float, num_bytes: float, flops: float) -> float:
        return 100 * max(num_bytes / self.read, flops / self.product) / seconds


def best_seconds(call: Callable[[int], object], inner: int, budget: float = 0.4) -> float:
    """The fastest of repeated rounds of `inner` calls, a call; at least 3 rounds, about `budget` seconds."""
    call(0)
    best, spent, rounds = float("inf"), 0.0, 0
    while rounds < 3 or spent < budget:
        start = time.perf_counter()
        for i in range(inner):
            call(i)
        elapsed = time.perf_counter() - start
        best, spent, rounds = min(best, elapsed / inner), spent + elapsed, rounds + 1
    return best


def measure_limits() -> Limits:
    buffer = torch.ones(2**28)  # 1 GiB, more than the largest caches
    has_kernels = library.unavailable() is None
    read = buffer.nbytes / best_seconds(lambda _: library.read(buffer) if has_kernels else buffer.sum(), 1, 2.0)
    a, b = torch.randn(2, 2048, 2048).bfloat16()
    return Limits(read, 2 * 2048**3 / best_seconds(lambda _: a @ b, 1, 1.0))


def random_weight(kind: str, n: int, k: int) -> Tensor | QuantizedWeight:
    if kind == "bf16":
        return (torch.randn(n, k) / k**0.5).bfloat16()
    bits = 4 if kind.startswith("int4") else 8
    group = None if kind == "int8 x int8" else 32 if k % 64 else 64 if kind == "int4 g64" else 32
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8)
    scale = (torch.rand(n, k // (group or k)) * 0.01 + 0.001).bfloat16()
    activations = ActivationScheme() if kind == "int8 x int8" else None
    scheme = WeightScheme(bits, "int", True, "group" if group else "channel", group, activations)
    offset = -8 * scale if bits == 4 else None
    if kind == "int4 q4_1":
        offset = (torch.randn_like(scale.float()) * 0.05).bfloat16()
        scheme = WeightScheme(bits, "int", False, "group", group)
    return QuantizedWeight(scheme, (n, k), codes if bits == 4 else codes.view(torch.int8), scale, offset)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def check_product(weight: Tensor | QuantizedWeight, x: Tensor, actual: Tensor) -> float:
    layout = TorchDense if isinstance(weight, Tensor) else TorchQuantized
    exact = layout(weight.float() if isinstance(weight, Tensor) else weight, torch.float32, CPU)
    return relative_error(actual, exact.linear(x.float(), None, torch.float32))


class Benchmark:
    """The table of one model shape."""

    def __init__(self, args: argparse.Namespace, limits: Limits) -> None:
        self.args, self.limits, self.table = args, limits, list[Row]()

    def add(self, operation: str, rows: int, seconds: float, num_bytes: float, flops: float, error: float) -> None:
        percent = self.limits.percent(seconds, num_bytes, flops)
        row = Row(operation, rows, seconds * 1e6, num_bytes / seconds / 1e9, flops / seconds / 1e9, percent, error)
        self.table.append(row)
        print(
            f"{operation:34} {rows:5} {row.microseconds:11.1f} us {row.gigabytes_per_second:7.1f} GB/s "
            f"{row.gigaflops:8.1f} GFLOP/s {percent:6.1f} %   error {error:.1e}",
            flush=True,
        )

    def products(self, kinds: Sequence[str]) -> None:
        a = self.args
        width = (a.heads + 2 * a.kv_heads) * a.head_dim
        shapes = [(width, a.hidden), (a.hidden, a.heads * a.head_dim), (2 * a.inner, a.hidden), (a.hidden, a.inner)]
        for kind in kinds:
            weights = [random_weight(kind, n, k) for n, k in shapes]
            layers = [[ops.pack_weight(weight, torch.bfloat16) for weight in weights] for _ in range(a.layers)]
            self.product(f"linear {kind}, a layer", shapes, weights, layers)
        for kind in ("bf16", "int8"):
            weight = random_weight(kind, a.vocab, a.hidden)
            packed = ops.pack_weight(weight, torch.bfloat16)
            self.product(f"linear {kind}, output layer", [(a.vocab, a.hidden)], [weight], [[packed]])

    def product(
        self,
        name: str,
        shapes: Sequence[tuple[int, int]],
        weights: Sequence[Tensor | QuantizedWeight],
        layers: Sequence[Sequence[ops.PackedWeight]],
    ) -> None:
        num_bytes = sum(packed.num_bytes for packed in layers[0])
        for rows in self.args.rows:
            inputs = {k: torch.randn(rows, k).bfloat16() for _, k in shapes}

            def call(i: int, inputs: dict[int, Tensor] = inputs) -> None:
                for packed in layers[i % len(layers)]:
                    ops.linear(inputs[packed.shape[1]], packed)

            seconds = best_seconds(call, len(layers))
            errors = [
                check_product(weight, inputs[weight.shape[1]], ops.linear(inputs[weight.shape[1]], packed))
                for weight, packed in zip(weights, layers[0], strict=True)
            ]
            flops = 2 * rows * sum(n * k for n, k in shapes)
            moved = num_bytes + 2 * rows * sum(n + k for n, k in shapes)
            self.add(name, rows, seconds, moved, flops, max(errors))

    def elementwise(self) -> None:
        a = self.args
        for rows in a.rows:
            x, residual = torch.randn(2, rows, a.hidden).bfloat16()
            weight = torch.randn(a.hidden).bfloat16()
            gate_up = torch.randn(rows, 2 * a.inner).bfloat16()
            cases: list[tuple[str, Callable[[], Tensor], Callable[[], Tensor], int]] = [
                (
                    "rms_norm",
                    lambda x=x, weight=weight: ops.rms_norm(x, weight, 1e-5),
                    lambda x=x, weight=weight: reference.rms_norm(x.float(), weight.float(), 1e-5),
                    2 * x.nbytes,
                ),
                (
                    "add_rms_norm",
                    lambda x=x, r=residual, weight=weight: ops.add_rms_norm(x, r.clone(), weight, 1e-5),
                    lambda x=x, r=residual, weight=weight: reference.add_rms_norm(x, r.clone(), weight, 1e-5),
                    6 * x.nbytes,
                ),
                (
                    "silu_mul",
                    lambda x=gate_up: ops.silu_mul(x),
                    lambda x=gate_up: reference.silu_mul(x.float()),
                    gate_up.nbytes * 3 // 2,
                ),
            ]
            for name, call, expected, moved in cases:
                seconds = best_seconds(lambda _, call=call: call(), 20, 0.1)
                self.add(name, rows, seconds, moved, 0, relative_error(call(), expected()))

    def attention(self, requests: Sequence[tuple[int, int, int]]) -> None:
        """Requests (count, query rows, context)."""
        a = self.args
        for count, rows, context in requests:
            blocks = -(-context // BLOCK_SIZE)
            table = (torch.randperm(count * blocks) + 1).int().view(count, blocks)
            positions = torch.arange(context - rows, context).repeat(count)
            owner = torch.arange(count).repeat_interleave(rows)
            slots = table[owner, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
            starts, lengths = torch.arange(count + 1).int() * rows, torch.full((count,), context).int()
            meta = ops.AttentionMetadata(starts, lengths, table, slots, rows, context, count if rows == 1 else 0)
            shape = (count * blocks + 1, BLOCK_SIZE, a.kv_heads, a.head_dim, torch.bfloat16)
            caches = [ops.KVCache.allocate(*shape) for _ in range(a.layers)]
            for cache in caches:
                cache.k.normal_()
                cache.v.normal_()
            qkv = torch.randn(count * rows, (a.heads + 2 * a.kv_heads) * a.head_dim).bfloat16()
            cos_sin = torch.randn(context, a.head_dim).clamp(-1, 1)
            heads = (a.heads, a.kv_heads, a.head_dim)

            def rotate(
                i: int,
                arguments: tuple[Tensor, Tensor, Tensor] = (qkv, positions, cos_sin),
                caches: list[ops.KVCache] = caches,
                meta: ops.AttentionMetadata = meta,
                heads: tuple[int, int, int] = heads,
            ) -> Tensor:
                return ops.rotary_and_store(*arguments, caches[i % len(caches)], meta, *heads)

            q = rotate(0)

            def attend(
                i: int, q: Tensor = q, caches: list[ops.KVCache] = caches, meta: ops.AttentionMetadata = meta
            ) -> Tensor:
                return ops.paged_attention(q, caches[i % len(caches)], meta, 0.125)

            label = f"{count} x {rows} of {context}"
            expected_q = reference.rotary_and_store(
                qkv.float(), positions, cos_sin, caches[0], meta, *heads, None, None, 1e-6, False
            )
            self.add(
                f"rotary_and_store {label}",
                count * rows,
                best_seconds(rotate, len(caches), 0.2),
                2 * qkv.nbytes,
                0,
                relative_error(q, expected_q),
            )
            error = relative_error(attend(0), reference.paged_attention(q, caches[0], meta, 0.125, None, None, None))
            pairs = count * (rows * context - rows * (rows - 1) / 2)
            self.add(
                f"paged_attention {label}",
                count * rows,
                best_seconds(attend, len(caches), 0.3),
                4 * count * context * a.kv_heads * a.head_dim + 2 * q.nbytes,
                4 * a.heads * a.head_dim * pairs,
                error,
            )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rows", type=lambda s: [int(x) for x in s.split(",")], default=[1, 2, 4, 8, 16, 32, 128, 1024]
    )
    for name, default in (("hidden", 576), ("inner", 1536), ("heads", 9), ("kv-heads", 3), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, help="threads of torch and of the kernels; default: torch's")
    parser.add_argument("--json", type=Path, help="also write the table here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for operation, candidate, chosen, reason in ops.report():
        print(f"{'*' if chosen else ' '} {operation:18} {candidate:20} {reason}")
    limits = measure_limits()
    print(
        f"{torch.get_num_threads()} threads; limits: {limits.read / 1e9:.1f} GB/s read, "
        f"{limits.product / 1e9:.0f} GFLOP/s in a bfloat16 product of torch"
    )
    benchmark = Benchmark(args, limits)
    with torch.inference_mode():
        benchmark.products(("bf16", "int4 g64", "int4 q4_1", "int8", "int8 x int8"))
        benchmark.elementwise()
        benchmark.attention([(1, 1, 160), (1, 1, 1000), (8, 1, 160), (32, 1, 160), (1, 512, 512), (8, 1024, 1024)])
    if args.json:
        result = {
            "threads": torch.get_num_threads(),
            "limits": asdict(limits),
            "rows": [asdict(r) for r in benchmark.table],
        }
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
