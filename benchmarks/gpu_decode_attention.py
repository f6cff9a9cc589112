"""Decode attention with its rotation and store where a model has it: between two products, in a graph of many layers.

    python benchmarks/gpu_decode_attention.py [--layers 20] [--block-size 16]

Alone, launches of one kernel hide each other's beginnings and ends. Here a layer is a product that makes q, k and v,
attention, and a product of what comes out, each layer with a cache of its own, so that no keys are in the L2 cache.
Microseconds a layer less those of the products alone: Triton's two kernels, Triton's one, and the one in CUDA C++ with
some sizes. Requests have 100 to 1,024 tokens and as many to come; those that are left after so many steps, with what
they have by then, are a step of the workload "mix256".
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial

import torch
from gpu_attention import GPU, HEAD, KV_HEADS, SHAPES, error, graph_microseconds, make_step, rotary_inputs
from torch import Tensor

from octavo import ops
from octavo.ops.cuda import decode_attention
from octavo.ops.cuda.decode_attention import Sizes
from octavo.ops.triton import attention_decode, attention_fused
from octavo.ops.triton.rotary import rotary_and_store

HIDDEN, BANDWIDTH, EPS = 1024, 4.3e12, 1e-6
VARIANTS = (Sizes(4, 8, 2), Sizes(8, 16, 1))


def mix_after(steps: int) -> list[int]:
    """Lengths of the requests of mix256 that still run."""
    rng = random.Random(0)
    sizes = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
    return [prompt + steps for prompt, output in sizes if output > steps]


class Layers:
    """A stack whose attention is exchanged."""

    def __init__(self, lengths: list[int], heads: int, layers: int, block_size: int) -> None:
        self.heads, self.batch = heads, len(lengths)
        self.caches, self.meta = make_step([1] * self.batch, lengths, block_size, layers=layers)
        _, self.cos_sin, self.norm, _ = rotary_inputs(self.batch, heads)
        self.positions = self.meta.seq_lens.long() - 1
        self.x = torch.randn(self.batch, HIDDEN, device=GPU).bfloat16()
        width = heads * HEAD
        self.before = [self._weight(width + 2 * KV_HEADS * HEAD, HIDDEN) for _ in range(layers)]
        self.after = [self._weight(HIDDEN, width) for _ in range(layers)]

    @staticmethod
    def _weight(n: int, k: int) -> Tensor:
        return torch.randn(n, k, device=GPU).bfloat16() / 32

    def microseconds(self, attend: Callable[[Tensor, ops.KVCache], Tensor]) -> float:
        """Of a layer."""

        def layer(i: int) -> Tensor:
            return attend(self.x @ self.before[i].T, self.caches[i]) @ self.after[i].T

        return graph_microseconds([partial(layer, i) for i in range(len(self.caches))], 9)

    def nothing(self, qkv: Tensor, cache: ops.KVCache) -> Tensor:
        return qkv[:, : self.heads * HEAD]

    def two_calls(self, qkv: Tensor, cache: ops.KVCache) -> Tensor:
        out = torch.empty(self.batch, self.heads * HEAD, device=GPU, dtype=torch.bfloat16)
        shape, norms = (self.heads, KV_HEADS, HEAD), (self.norm, self.norm, EPS, False)
        q = rotary_and_store(qkv, self.positions, self.cos_sin, cache, self.meta, *shape, *norms)
        attention_decode.decode(q, cache, self.meta, out, self.batch, HEAD**-0.5)
        return out

    def one_call(self, qkv: Tensor, cache: ops.KVCache) -> Tensor:
        programs = attention_decode.tile_for(HEAD, self.heads // KV_HEADS, qkv.dtype, cache.dtype).programs
        splits = attention_decode.splits_for(self.batch * KV_HEADS, programs, GPU)  # given, so that it is Triton's
        shape, norms = (self.heads, KV_HEADS, HEAD), (self.norm, self.norm, EPS)
        args = (qkv, self.positions, self.cos_sin, cache, self.meta, *shape, HEAD**-0.5, None, None, *norms)
        return attention_fused.rotary_and_attend(*args, num_splits=splits)  # type: ignore[no-any-return]

    def in_cuda(self, qkv: Tensor, cache: ops.KVCache, sizes: Sizes | None = None) -> Tensor:
        out = torch.empty(self.batch, self.heads * HEAD, device=GPU, dtype=torch.bfloat16)
        args = (qkv, None, None, self.positions, self.cos_sin, cache, self.meta, out, HEAD**-0.5)
        decode_attention.rotary_and_attend(*args, self.norm, self.norm, EPS, False, sizes=sizes)
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    attention_fused.MAX_REQUESTS = 1024
    cases = [(f"mix256 after {steps}", mix_after(steps)) for steps in (50, 300, 500, 700, 850, 960)]
    cases += [(f"{count} x {length}", [length] * count) for count, length in ((256, 640), (32, 640), (16, 640))]
    cases += [("8 x 640", [640] * 8), ("1 x 640", [640]), ("1 x 8000", [8000])]
    sizes = " ".join(f"{f'cuda {v.warps}/{v.stages}/{v.resident}':>12}" for v in VARIANTS)
    print(f"{'case':<18} requests model  limit  triton two  triton one {sizes}  products")
    for label, lengths in cases:
        limit = 4 * sum(lengths) * KV_HEADS * HEAD / BANDWIDTH * 1e6
        for name, heads in SHAPES.items():
            stack = Layers(lengths, heads, args.layers, args.block_size)
            qkv = stack.x @ stack.before[0].T
            difference = error(stack.in_cuda(qkv, stack.caches[0]), stack.two_calls(qkv, stack.caches[0]))
            assert difference < 6e-3, difference
            products = stack.microseconds(stack.nothing)
            calls = [stack.two_calls, stack.one_call, *(partial(stack.in_cuda, sizes=v) for v in VARIANTS)]
            times = " ".join(f"{stack.microseconds(call) - products:12.1f}" for call in calls)
            print(f"{label:<18}{len(lengths):>9} {name:<5}{limit:7.1f}{times} {products:9.1f}", flush=True)
            del stack


if __name__ == "__main__":
    main()
