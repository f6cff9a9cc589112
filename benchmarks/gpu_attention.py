"""Checks the attention and rotary kernels on a GPU against the reference, then times them beside what the GPU allows.

    python benchmarks/gpu_attention.py [--only check,decode,fused,prefill,rotary] [--block-size 16] [--bandwidth 4.3]

Shapes are those of Llama-3.1-8B (32 query heads, 8 key heads, 128 channels) and Qwen3-0.6B (16 query heads). Decode is
timed in a CUDA graph that walks through caches of several layers, so that keys come from memory as in a real step;
`%` is the share of the bandwidth that reading keys and values once would need. Prefill gives TFLOP/s of the two
products over the visible keys.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial

import torch
import triton.testing
from torch import Tensor

from octavo import ops
from octavo.ops import reference
from octavo.ops.triton import attention_cudnn, attention_fused, attention_plans, runtime
from octavo.ops.triton.attention import paged_attention
from octavo.ops.triton.attention_decode import decode
from octavo.ops.triton.attention_fused import rotary_and_attend
from octavo.ops.triton.attention_prefill import Tiles, prefill
from octavo.ops.triton.rotary import rotary_and_store

GPU = torch.device("cuda")
KV_HEADS, HEAD = 8, 128
SHAPES = {"8B": 32, "0.6B": 16}  # query heads
# keys a tile, stages, programs a multiprocessor that cut a context into parts; None leaves it to the kernel
DECODE_VARIANTS = ((None, None, None), (64, 5, 2), (64, 5, 4), (64, 3, 3), (128, 3, 2), (128, 3, 3))
PREFILL_VARIANTS = (Tiles(128, 64, 8, 5), Tiles(128, 128, 8, 3), Tiles(64, 64, 4, 3))


def make_step(
    rows: list[int], lengths: list[int], block_size: int, kv_heads: int = KV_HEADS, head: int = HEAD, layers: int = 1
) -> tuple[list[ops.KVCache], ops.AttentionMetadata]:
    """Random caches [layers] with the pages of these requests in random order, and the step's metadata."""
    counts = [-(-n // block_size) for n in lengths]
    total = sum(counts) + 1
    pages = (torch.randperm(total - 1) + 1).int()
    table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    slots = []
    for s, (piece, count) in enumerate(zip(pages.split(counts), counts, strict=True)):
        table[s, :count] = piece
        new = torch.arange(lengths[s] - rows[s], lengths[s])
        slots.append(piece[new // block_size].long() * block_size + new % block_size)
    shape = (layers, total, kv_heads, block_size, head)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=GPU).normal_() for _ in range(2))
    query_start = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32, device=GPU)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=GPU)
    decodes = next((i for i, n in enumerate(rows) if n > 1), len(rows))
    meta = ops.AttentionMetadata(
        query_start, seq_lens, table.to(GPU), torch.cat(slots).to(GPU), max(rows), max(lengths), decodes, rows, lengths
    )
    return [ops.KVCache(k[i], v[i]) for i in range(layers)], meta


def queries(meta: ops.AttentionMetadata, heads: int, head: int = HEAD) -> Tensor:
    return torch.randn(len(meta.slot_mapping), heads, head, dtype=torch.bfloat16, device=GPU)


def poisoned(q: Tensor) -> Tensor:
    return torch.full((q.shape[0], q.shape[1] * q.shape[2]), float("nan"), dtype=q.dtype, device=GPU)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def exact(q: Tensor, cache: ops.KVCache, meta: ops.AttentionMetadata, *options: object) -> Tensor:
    plain = ops.KVCache(cache.k.float(), cache.v.float())
    return reference.paged_attention(q.float(), plain, meta, HEAD**-0.5, *(*options, None, None, None)[:3])  # type: ignore[arg-type]


def report(name: str, value: float, limit: float = 6e-3) -> None:
    print(f"{'ok ' if value < limit else 'BAD'} {name:<44} {value:.1e}", flush=True)  # a NaN is not below


def check_decode(block_size: int) -> None:
    rows, lengths = [1] * 6, [1, 63, 64, 300, 1500, 5000]
    (cache,), meta = make_step(rows, lengths, block_size)
    float8 = ops.KVCache(cache.k.to(torch.float8_e4m3fn), cache.v.to(torch.float8_e4m3fn))
    for name, heads in SHAPES.items():
        q = queries(meta, heads)
        for block_n, stages in sorted({(n or 0, s or 0) for n, s, _ in DECODE_VARIANTS}):
            out = poisoned(q)
            decode(q, cache, meta, out, 6, HEAD**-0.5, block_n=block_n or None, num_stages=stages or None)
            report(f"decode {name}, {block_n} keys, {stages} stages", error(out, exact(q, cache, meta)))
    sinks = torch.randn(16, device=GPU)
    for options in ((100,), (None, 20.0), (700, 20.0, sinks)):
        out = poisoned(q)
        decode(q, cache, meta, out, 6, HEAD**-0.5, *options)
        report(f"decode window, softcap, sinks {options[:2]}", error(out, exact(q, cache, meta, *options)))
    out = poisoned(q)
    decode(q, float8, meta, out, 6, HEAD**-0.5)
    report("decode float8 cache", error(out, exact(q, float8, meta)))
    outs = [poisoned(q) for _ in range(3)]
    for out, splits in zip(outs, (1, 5, 16), strict=True):
        decode(q, cache, meta, out, 6, HEAD**-0.5, num_splits=splits, part_keys=512)
    report("decode fixed parts", error(outs[0], exact(q, cache, meta)))
    report("decode fixed parts, other bits", float(any((out != outs[0]).any() for out in outs)), 0.5)
    for _ in range(200):  # a race between parts would show as a difference
        decode(q, cache, meta, outs[1], 6, HEAD**-0.5)
        decode(q, cache, meta, outs[2], 6, HEAD**-0.5)
        if not torch.equal(outs[1], outs[2]):
            report("decode run to run", 1.0)
            break
    for group, head in ((7, 64), (3, 80), (1, 256)):
        (small,), other = make_step(rows, lengths, block_size, 2, head)
        q = queries(other, 2 * group, head)
        report(f"decode group {group}, head {head}", error(run_entry(q, small, other), exact(q, small, other)))


def run_entry(q: Tensor, cache: ops.KVCache, meta: ops.AttentionMetadata) -> Tensor:
    return paged_attention(q, cache, meta, HEAD**-0.5, None, None, None)


def check_prefill(block_size: int) -> None:
    rows, lengths = [1, 1, 700, 33, 1500, 7], [900, 1, 700, 500, 3333, 7]
    (cache,), meta = make_step(rows, lengths, block_size)
    float8 = ops.KVCache(cache.k.to(torch.float8_e4m3fn), cache.v.to(torch.float8_e4m3fn))
    for name, heads in SHAPES.items():
        q = queries(meta, heads)
        expected = exact(q, cache, meta)
        for tiles in PREFILL_VARIANTS if name == "8B" else PREFILL_VARIANTS[:1]:
            out = poisoned(q)
            prefill(q, cache, meta, out, 0, 6, q.shape[0], HEAD**-0.5, tiles=tiles)
            report(f"prefill {name} {tuple(tiles)}", error(out, expected))
    limits = {name: getattr(attention_plans, name) for name in dir(attention_plans) if name.startswith("MIN_")}
    for name in limits:
        setattr(attention_plans, name, 1)
    report("entry with cuDNN", error(run_entry(q, cache, meta), expected))
    for name, value in limits.items():
        setattr(attention_plans, name, value)
    for options in ((100,), (None, 20.0, torch.randn(16, device=GPU))):
        out = poisoned(q)
        prefill(q, cache, meta, out, 0, 6, q.shape[0], HEAD**-0.5, *options)
        report(f"prefill window, softcap, sinks {options[:2]}", error(out, exact(q, cache, meta, *options)))
    out = poisoned(q)
    prefill(q, float8, meta, out, 0, 6, q.shape[0], HEAD**-0.5)
    report("prefill float8 cache", error(out, exact(q, float8, meta)))


def check_rotary(block_size: int) -> None:
    (cache,), meta = make_step([1, 300], [900, 300], block_size)
    for name, heads in SHAPES.items():
        qkv, cos_sin, norm, positions = rotary_inputs(301, heads)
        plain = ops.KVCache(cache.k.float(), cache.v.float())
        shape = (heads, KV_HEADS, HEAD)
        for weight in (None, norm):
            q = rotary_and_store(qkv, positions, cos_sin, cache, meta, *shape, weight, weight, 1e-6, False)
            w = None if weight is None else weight.float()
            expected = reference.rotary_and_store(
                qkv.float(), positions, cos_sin, plain, meta, *shape, w, w, 1e-6, False
            )
            worst = max(error(q, expected), error(cache.k, plain.k), error(cache.v, plain.v))
            report(f"rotary {name}, norm {weight is not None}", worst)


def rotary_inputs(tokens: int, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkv = torch.randn(tokens, (heads + 2 * KV_HEADS) * HEAD, dtype=torch.bfloat16, device=GPU)
    angles = torch.arange(32768, device=GPU)[:, None] * torch.rand(HEAD // 2, device=GPU)
    norm = torch.randn(HEAD, dtype=torch.bfloat16, device=GPU)
    return qkv, torch.cat((angles.cos(), angles.sin()), 1), norm, torch.arange(tokens, device=GPU)


def graph_microseconds(calls: list[Callable[[], object]], replays: int = 5) -> float:
    """Time of one call: the median replay of a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def time_decode(block_size: int, bandwidth: float) -> None:
    print(f"\ndecode, us (% of {bandwidth} TB/s); variants: keys a tile / stages / programs a multiprocessor")
    print("shape   B  context" + "".join(f"{f'{n}/{s}/{p}' if n else 'default':>16}" for n, s, p in DECODE_VARIANTS))
    cases = [
        (b, [n] * b, str(n)) for b in (1, 8, 32, 64, 256) for n in ((300, 640, 1500, 8000) if b < 256 else (640, 8000))
    ]
    cases.append((256, torch.randint(640, 1501, (256,)).tolist(), "640..1500"))
    for batch, lengths, label in cases:
        size = 4 * sum(lengths) * KV_HEADS * HEAD
        layers = max(2, min(64, 200_000_000 // size))
        caches, meta = make_step([1] * batch, lengths, block_size, layers=layers)
        for name, heads in SHAPES.items():
            q = queries(meta, heads)
            out = poisoned(q)
            cells = []
            for block_n, stages, programs in DECODE_VARIANTS:
                splits = programs and max(1, programs * runtime.num_multiprocessors(GPU) // (batch * KV_HEADS))
                options = {"num_splits": splits, "block_n": block_n, "num_stages": stages}
                us = graph_microseconds(
                    [partial(decode, q, cache, meta, out, batch, HEAD**-0.5, **options) for cache in caches]
                )
                cells.append(f"{us:9.1f} ({100 * size / bandwidth / 1e6 / us:3.0f}%)")
            print(f"{name:<5}{batch:>4}{label:>10}" + "".join(f"{c:>16}" for c in cells), flush=True)
        del caches


def fused_inputs(batch: int, length: int, heads: int, block_size: int, layers: int) -> tuple[list[ops.KVCache], tuple]:
    """Caches, and the other arguments of the fused operation for a step of decodes at one length."""
    caches, meta = make_step([1] * batch, [length] * batch, block_size, layers=layers)
    qkv, cos_sin, norm, _ = rotary_inputs(batch, heads)
    positions = torch.full((batch,), length - 1, device=GPU)
    weight = None if heads == SHAPES["8B"] else norm
    return caches, (qkv, positions, cos_sin, meta, (heads, KV_HEADS, HEAD), weight)


def two_calls(cache: ops.KVCache, qkv: Tensor, positions: Tensor, cos_sin: Tensor, meta, shape, weight) -> Tensor:  # type: ignore[no-untyped-def]
    q = rotary_and_store(qkv, positions, cos_sin, cache, meta, *shape, weight, weight, 1e-6, False)
    return run_entry(q, cache, meta)


def one_call(  # type: ignore[no-untyped-def]
    cache: ops.KVCache, qkv: Tensor, positions: Tensor, cos_sin: Tensor, meta, shape, weight, **cut
) -> Tensor:
    options = (HEAD**-0.5, None, None, weight, weight, 1e-6)
    return rotary_and_attend(qkv, positions, cos_sin, cache, meta, *shape, *options, **cut)


def check_fused(block_size: int) -> None:
    for name, heads in SHAPES.items():
        for length in (1, 64, 65, 1500, 5000):
            (cache, other), args = fused_inputs(8, length, heads, block_size, 2)
            other.k.copy_(cache.k)
            other.v.copy_(cache.v)
            worst = error(one_call(cache, *args), two_calls(other, *args))
            worst = max(worst, error(cache.k, other.k), error(cache.v, other.v))
            report(f"fused {name}, {length} keys", worst)
    expected = one_call(cache, *args)
    same = all(torch.equal(one_call(cache, *args), expected) for _ in range(200))
    report("fused run to run", 1.0 - same)


def time_fused(block_size: int) -> None:
    variants = ((64, 2), (64, 3), (64, 4), (128, 2))  # keys a tile, programs a multiprocessor
    print("\nrotary, store and decode, us")
    print("shape   B  context   two calls      one" + "".join(f"{f'{n}/{p}':>9}" for n, p in variants))
    cases = [*itertools.product((1, 8, 32), (300, 640, 1500)), (1, 8000), (4, 640), (16, 640), (64, 640), (256, 640)]
    for batch, length in cases:
        layers = max(2, min(64, 200_000_000 // (4 * batch * length * KV_HEADS * HEAD)))
        for name, heads in SHAPES.items():
            caches, args = fused_inputs(batch, length, heads, block_size, layers)
            calls: list[Callable[..., Tensor]] = [two_calls, one_call]
            for block_n, programs in variants if batch <= attention_fused.MAX_REQUESTS else ():
                splits = max(1, programs * runtime.num_multiprocessors(GPU) // (batch * KV_HEADS))
                calls.append(partial(one_call, num_splits=splits, block_n=block_n))
            times = [graph_microseconds([partial(call, cache, *args) for cache in caches]) for call in calls]
            print(f"{name:<5}{batch:>4}{length:>9}   " + "".join(f"{t:9.1f}" for t in times), flush=True)


def show(name: str, call: Callable[[], object], flops: int) -> None:
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    ms = triton.testing.do_bench(call, warmup=5, rep=30, return_mode="median")
    print(f"   {name:<34} {flops / ms / 1e9:6.0f} ({ms:.2f}), first call {first:.2f} s", flush=True)


def time_prefill(block_size: int) -> None:
    print("\nprefill of 8B, TFLOP/s (ms); Triton's (rows, keys, warps, stages)")
    start = time.perf_counter()
    attention_cudnn.build_plans(32, KV_HEADS, HEAD, torch.bfloat16, GPU, 16384, 32768, 256)
    torch.cuda.synchronize()
    print(f"plans of cuDNN for long prompts built in {time.perf_counter() - start:.2f} s", flush=True)
    cases = ((4, 2048, 0), (8, 2048, 0), (4, 1024, 1024), (1, 8192, 0), (1, 8192, 22000), (1, 8000, 21000))
    for count, rows, past in cases:
        flops = 4 * 32 * HEAD * count * sum(past + i + 1 for i in range(rows))
        print(f"{count} x {rows} after {past}:", flush=True)
        (cache,), meta = make_step([rows] * count, [past + rows] * count, block_size)
        q = queries(meta, 32)
        out = poisoned(q)
        for tiles in PREFILL_VARIANTS:
            call = partial(prefill, q, cache, meta, out, 0, count, count * rows, HEAD**-0.5, tiles=tiles)
            show(f"{tuple(tiles)}", call, flops)
        attempts: dict[str, Callable[[], object]] = {"entry": partial(run_entry, q, cache, meta)}
        attempts["gather alone"] = partial(attention_cudnn.gather, cache, meta.block_table, 0, past + rows, q.dtype)
        if past == 0:
            k, v = attention_cudnn.gather(cache, meta.block_table, 0, rows, q.dtype)
            attempts |= contiguous_calls(q.view(count, rows, 32, HEAD), k, v, meta)
        for name, call in attempts.items():
            try:
                show(name, call, flops)
            except RuntimeError as problem:
                print(f"   {name}: {str(problem).splitlines()[0]}")


def contiguous_calls(q: Tensor, k: Tensor, v: Tensor, meta: ops.AttentionMetadata) -> dict[str, Callable[[], object]]:
    """cuDNN on keys that are gathered already: by rounded and by exact shapes, and its variable-length form."""
    scale = HEAD**-0.5
    exact = torch.ops.aten._scaled_dot_product_cudnn_attention
    heads_first = [x.transpose(1, 2).contiguous() for x in (k, v)]  # this order in memory gets plans by exact shape
    args = (None, True, 0.0, True, False)
    rows, flat = q.shape[1], [x.flatten(0, 1) for x in (q, k, v)]
    starts = meta.query_start
    varlen = partial(torch.ops.aten._cudnn_attention_forward, *flat, None, starts, starts, rows, rows, *args[1:])
    return {
        "cuDNN by rounded shapes alone": partial(attention_cudnn._cudnn, q, k, v, True, scale),
        "cuDNN by exact shapes alone": partial(exact, q.transpose(1, 2), *heads_first, *args, scale=scale),
        "cuDNN of variable length alone": partial(varlen, scale=scale),
    }


def time_rotary(block_size: int, bandwidth: float) -> None:
    print(f"\nrotary and store, us (% of {bandwidth} TB/s)")
    for name, heads in SHAPES.items():
        for tokens in (1, 32, 256, 8192):
            (cache,), meta = make_step([tokens], [tokens], block_size)
            qkv, cos_sin, norm, positions = rotary_inputs(tokens, heads)
            weight = None if name == "8B" else norm

            heads_and_norms = (heads, KV_HEADS, HEAD, weight, weight, 1e-6, False)
            call = partial(rotary_and_store, qkv, positions, cos_sin, cache, meta, *heads_and_norms)
            us = graph_microseconds([call] * 20)
            print(f"{name:<5}{tokens:>6}{us:9.1f} ({100 * 4 * qkv.numel() / bandwidth / 1e6 / us:3.0f}%)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="check,decode,fused,prefill,rotary")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that a copy reaches")
    args = parser.parse_args()
    parts = args.only.split(",")
    torch.manual_seed(0)
    start = time.perf_counter()
    if "check" in parts:
        for check in (check_decode, check_prefill, check_rotary, check_fused):
            check(args.block_size)
        print(f"checked in {time.perf_counter() - start:.0f} s", flush=True)
    if "decode" in parts:
        time_decode(args.block_size, args.bandwidth)
    if "fused" in parts:
        time_fused(args.block_size)
    if "prefill" in parts:
        time_prefill(args.block_size)
    if "rotary" in parts:
        time_rotary(args.block_size, args.bandwidth)
    print(f"all in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
