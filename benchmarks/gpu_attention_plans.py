"""Times what steps with long prompts ask of attention after the plans of a start, and decodes that share a prefix.

    python benchmarks/gpu_attention_plans.py [--only prompts,prefix,shared] [--json FILE]

Shapes are those of Llama-3.1-8B (32 query heads, 8 key heads, 128 channels); `shared` has those of 16 heads too. A step
is given as requests x new tokens + past. `first` is the first call of a shape, which must find its plan: below 5 ms.
Keys of `shared` come from memory, by a graph over several layers, but for the shared ones, which fit the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import triton.testing
from gpu_attention import GPU, HEAD, KV_HEADS, error, graph_microseconds, make_step, poisoned, queries, run_entry
from torch import Tensor

from octavo import ops
from octavo.ops.triton import attention_cudnn, attention_plans
from octavo.ops.triton.ahead import compile_ahead
from octavo.ops.triton.attention_decode import decode
from octavo.ops.triton.attention_prefill import Tiles, prefill
from octavo.ops.triton.attention_shared import decode_shared

HEADS, MAX_ROWS, MAX_CONTEXT, MAX_REQUESTS = 32, 16384, 32768, 256
SCALE = HEAD**-0.5
Runs = tuple[tuple[int, int, int], ...]  # requests, new tokens, past
STEPS: tuple[Runs, ...] = (
    ((8, 2048, 0),),
    ((64, 1, 2100), (7, 2048, 0), (1, 1984, 0)),
    ((32, 512, 0),),
    ((32, 512, 1536),),
    ((16, 1000, 0),),
    ((5, 3001, 0),),
    ((1, 16384, 0),),
    ((1, 13616, 16384), (1, 2768, 0)),
    ((1, 16384, 2768),),
    ((1, 16384, 13000),),
    ((1, 16160, 224), (1, 224, 0)),
)
WARM: Runs = ((4, 1, 900), (1, 300, 900), (8, 1024, 0), (4, 2000, 0), (1, 8192, 4000), (1, 8000, 9000))
TILES = (Tiles(128, 64, 8, 5), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3))


def lengths_of(runs: Runs) -> tuple[list[int], list[int]]:
    rows = [rows for count, rows, _ in runs for _ in range(count)]
    return rows, [rows + past for count, rows, past in runs for _ in range(count)]


def products(runs: Runs) -> int:
    """Floating-point operations of both products over the visible keys."""
    return 4 * HEADS * HEAD * sum(count * (rows * past + rows * (rows + 1) // 2) for count, rows, past in runs)


@contextmanager
def rounded_plans() -> Iterator[None]:
    """Without plans of exact shapes."""
    kept = attention_plans.plan_of
    attention_plans.plan_of = lambda *shape: kept(*shape)._replace(is_exact=False)
    try:
        yield
    finally:
        attention_plans.plan_of = kept


@contextmanager
def triton_alone() -> Iterator[None]:
    kept = attention_cudnn.serves
    attention_cudnn.serves = lambda q, meta: False
    try:
        yield
    finally:
        attention_cudnn.serves = kept


def milliseconds(call: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(call, warmup=5, rep=25, return_mode="median"))


def time_prompts(found: dict[str, object]) -> None:
    sizes = (HEADS, KV_HEADS, HEAD, torch.bfloat16, GPU, MAX_ROWS, MAX_CONTEXT, MAX_REQUESTS)
    start = time.perf_counter()
    count = attention_cudnn.build_plans(*sizes)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    attention_cudnn.build_plans(*sizes)
    torch.cuda.synchronize()
    print(f"{count} plans in {seconds:.2f} s; their calls {time.perf_counter() - start:.2f} s", flush=True)
    found["plans"] = [count, seconds]
    (cache,), meta = make_step(*lengths_of(WARM), 16)
    run_entry(queries(meta, HEADS), cache, meta)  # compiles the Triton kernels of all routes
    with triton_alone():
        run_entry(queries(meta, HEADS), cache, meta)
    print(f"{'step':<42}{'first ms':>9}{'ms':>8}{'TFLOP/s':>8}{'rounded':>9}{'Triton':>8}   differs from Triton")
    for runs in STEPS:
        name = ", ".join(f"{n} x {rows} + {past}" for n, rows, past in runs)
        (cache,), meta = make_step(*lengths_of(runs), 16)
        q = queries(meta, HEADS)
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = run_entry(q, cache, meta)
        torch.cuda.synchronize()
        first = 1e3 * (time.perf_counter() - start)
        call = partial(run_entry, q, cache, meta)
        ms = milliseconds(call)
        with rounded_plans():
            rounded = milliseconds(call)
        with triton_alone():
            off = error(out, run_entry(q, cache, meta))
            plain = milliseconds(call)
        speed = products(runs) / ms / 1e9
        found[name] = [first, ms, rounded, plain, off]
        print(f"{name:<42}{first:9.1f}{ms:8.3f}{speed:8.0f}{rounded:9.3f}{plain:8.3f}   {off:.0e}", flush=True)


def past_by_cudnn(
    q: Tensor, cache: ops.KVCache, meta: ops.AttentionMetadata, out: Tensor, rows: int, past: int, is_shared: bool
) -> None:
    """Chunks of equal lengths after pasts of equal lengths in two calls and one merge; a shared past is read once."""
    count = len(meta.seq_lens)
    chunk_k = attention_cudnn.gather(cache, meta.block_table, past, rows, q.dtype, True)
    query = q.view(count, rows, *q.shape[1:])
    chunk, chunk_lse = attention_cudnn._cudnn(query, *chunk_k, True, SCALE)
    tables = meta.block_table[:1] if is_shared else meta.block_table
    before_k = attention_cudnn.gather(cache, tables, 0, past, q.dtype)
    before, before_lse = attention_cudnn._cudnn(q[None] if is_shared else query, *before_k, False, SCALE)
    by_head = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1) for x in (before, chunk)]
    by_row = [x.transpose(1, 2).flatten(0, 1).t() for x in (before_lse, chunk_lse)]
    attention_cudnn.merge(by_head[0], by_row[0], by_head[1], by_row[1], out)


def time_prefix(found: dict[str, object]) -> None:
    """A step of 32 chunks of 512 tokens after 1,536 that all share, by each way there is."""
    count, rows, past = 32, 512, 1536
    (cache,), meta = make_step([rows] * count, [rows + past] * count, 16)
    meta.block_table[1:, : past // 16] = meta.block_table[0, : past // 16]
    q = queries(meta, HEADS)
    expected, out = poisoned(q), poisoned(q)
    ways: dict[str, Callable[[], object]] = {}
    plain = (q, cache, meta)
    for tiles in TILES:
        way = partial(prefill, *plain, out, 0, count, count * rows, SCALE, tiles=tiles)
        ways[f"Triton {tuple(tiles)}"] = way
    ways["cuDNN, each its own past"] = partial(past_by_cudnn, *plain, out, rows, past, False)
    ways["cuDNN, the past read once"] = partial(past_by_cudnn, *plain, out, rows, past, True)
    compile_ahead(lambda: [ways[name]() for name in list(ways)[: len(TILES)]])
    prefill(*plain, expected, 0, count, count * rows, SCALE)
    print(f"\n{count} x {rows} after {past} that they share")
    for name, way in ways.items():
        try:
            out.fill_(float("nan"))
            way()
            off, ms = error(out, expected), milliseconds(way)
        except (RuntimeError, triton.runtime.errors.OutOfResources) as problem:
            print(f"   {name}: {str(problem).splitlines()[0]}", flush=True)
            continue
        found[name] = [ms, off]
        print(
            f"   {name:<32}{ms:8.3f} ms{products(((count, rows, past),)) / ms / 1e9:8.0f} TFLOP/s  {off:.0e}",
            flush=True,
        )


def sharing_step(requests: int, shared: int, own: int, layers: int) -> tuple[list[ops.KVCache], ops.AttentionMetadata]:
    """Decodes whose first `shared` keys lie in the same pages; `layers` caches."""
    blocks, each = shared // 16, own // 16
    table = torch.empty(requests, blocks + each, dtype=torch.int32, device=GPU)
    pages = torch.randperm(blocks + requests * each, device=GPU).int() + 1
    table[:, :blocks], table[:, blocks:] = pages[:blocks], pages[blocks:].view(requests, each)
    shape = (layers, len(pages) + 1, KV_HEADS, 16, HEAD)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=GPU).normal_() for _ in range(2))
    starts = torch.arange(requests + 1, dtype=torch.int32, device=GPU)
    lengths = torch.full((requests,), shared + own, dtype=torch.int32, device=GPU)
    slots = table[:, -1].long() * 16 + 15
    meta = ops.AttentionMetadata(starts, lengths, table, slots, 1, shared + own, requests)
    meta.num_shared = torch.tensor([shared], dtype=torch.int32, device=GPU)
    return [ops.KVCache(k[i], v[i]) for i in range(layers)], meta


def time_shared(found: dict[str, object], batches: list[int], lengths: list[int], own: int = 512) -> None:
    def launch() -> None:
        for requests in batches:
            (cache,), meta = sharing_step(requests, 32, 32, 1)
            for heads in (32, 16):
                q = torch.zeros(requests, heads, HEAD, dtype=torch.bfloat16, device=GPU)
                decode_shared(q, cache, meta, poisoned(q), SCALE)
                decode(q, cache, meta, poisoned(q), requests, SCALE)

    compile_ahead(launch)
    print(f"\ndecode with shared keys read once / decode, us; {own} own keys each; columns: shared keys")
    print("heads   B" + "".join(f"{n:>18}" for n in lengths) + "   worst difference")
    for heads in (32, 16):
        for requests in batches:
            cells, worst = [], 0.0
            for shared in lengths:
                layers = max(2, 150_000_000 // (4 * requests * own * KV_HEADS * HEAD))
                caches, meta = sharing_step(requests, shared, own, layers)
                q = torch.randn(requests, heads, HEAD, dtype=torch.bfloat16, device=GPU)
                outs = [poisoned(q) for _ in range(2)]
                once = [partial(decode_shared, q, cache, meta, outs[0], SCALE) for cache in caches]
                plain = [partial(decode, q, cache, meta, outs[1], requests, SCALE) for cache in caches]
                us = [graph_microseconds(calls, 3) for calls in (once, plain)]
                once[0](), plain[0]()
                worst = max(worst, error(outs[0], outs[1]))
                found[f"{heads} heads, {requests} x ({shared} + {own})"] = us
                cells.append(f"{us[0]:.1f} / {us[1]:.1f}")
            print(f"{heads:>5}{requests:>4}" + "".join(f"{c:>18}" for c in cells) + f"   {worst:.0e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="prompts,prefix,shared")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    start = time.perf_counter()
    found: dict[str, object] = {}
    parts = args.only.split(",")
    if "prompts" in parts:
        time_prompts(found)
    if "prefix" in parts:
        time_prefix(found)
    if "shared" in parts:
        time_shared(found, [16, 32, 64, 128, 256], [256, 512, 1536, 4096])
    print(f"all in {time.perf_counter() - start:.0f} s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
