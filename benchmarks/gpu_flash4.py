"""FlashAttention 4 (package `flash-attn-4`) beside cuDNN and the Triton kernel, on the steps that long prompts make.

    python benchmarks/gpu_flash4.py [--only start,check,time] [--json FILE]

Heads are those of Llama-3.1-8B. `ours` is what a step takes today, by cuDNN or Triton; each way of FlashAttention 4 is
a whole call of the operation, gathering of pages included where it has one. TFLOP/s of the two products over the
visible keys. `start` compiles the package's kernels, with an empty and then with a full cache on disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

CACHE = os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path(tempfile.gettempdir()) / "flash4"))
os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"

import torch  # noqa: E402
from gpu_attention import GPU, HEAD, KV_HEADS, error, exact, make_step, poisoned, queries, run_entry  # noqa: E402
from gpu_attention_plans import (  # noqa: E402
    HEADS,
    MAX_CONTEXT,
    MAX_REQUESTS,
    MAX_ROWS,
    SCALE,
    Runs,
    lengths_of,
    milliseconds,
    products,
    triton_alone,
)
from torch import Tensor  # noqa: E402

from octavo import ops  # noqa: E402
from octavo.ops.triton import attention_cudnn, attention_flash  # noqa: E402

STEPS: tuple[Runs, ...] = (
    ((1, 16384, 0),),
    ((1, 13616, 16384), (1, 2768, 0)),
    ((1, 16384, 2768),),
    ((1, 10848, 19152), (1, 5536, 0)),
    ((1, 16384, 13000),),
    ((8, 2048, 0),),
    ((64, 1, 2100), (7, 2048, 0), (1, 1984, 0)),
    ((32, 512, 1536),),
    ((32, 512, 0),),
    ((16, 1000, 0),),
    ((1, 2048, 0),),
    ((4, 512, 0),),
    ((40, 1, 600), (1, 512, 0)),
)
CHECKS: tuple[Runs, ...] = (
    ((1, 700, 0), (1, 33, 467), (1, 1500, 1833), (1, 7, 0)),
    ((2, 1, 900), (1, 700, 0), (1, 129, 128)),
    ((3, 256, 512),),
)


def by_pages(q: Tensor, cache: ops.KVCache, meta: ops.AttentionMetadata, out: Tensor, first: int, packs: bool) -> None:
    """Without gathering: pages by single copies."""
    from flash_attn.cute.interface import _flash_attn_fwd

    k, v = (x.transpose(1, 2) for x in (cache.k, cache.v))
    _flash_attn_fwd(
        q, k, v, cu_seqlens_q=meta.query_start[first:], seqused_k=meta.seq_lens[first:], causal=True,
        page_table=meta.block_table[first:], max_seqlen_q=meta.max_query_len, max_seqlen_k=meta.max_seq_len,
        softmax_scale=SCALE, pack_gqa=packs, out=out.view(q.shape),
    )  # fmt: skip


def gathered(q: Tensor, cache: ops.KVCache, meta: ops.AttentionMetadata, out: Tensor, first: int, packs: bool) -> None:
    """What an engine runs, or the same with query heads that share a key head in one tile."""
    kept = attention_flash.load
    if packs:
        attention_flash.load = lambda: lambda *args, **options: kept()(*args, **{**options, "pack_gqa": True})
    out[first:] = attention_flash.attend(q, cache, meta, SCALE)[first:]
    attention_flash.load = kept


def dense(q: Tensor, cache: ops.KVCache, meta: ops.AttentionMetadata, out: Tensor, first: int, packs: bool) -> None:
    """Neighbours of equal lengths in a call that knows them: another order of tiles."""
    from flash_attn.cute.interface import _flash_attn_fwd

    assert meta.query_lens_host is not None and meta.seq_lens_host is not None
    lengths = list(zip(meta.query_lens_host[first:], meta.seq_lens_host[first:], strict=True))
    row = first
    for (rows, context), run in itertools.groupby(lengths):
        count = len(list(run))
        k, v = attention_cudnn.gather(cache, meta.block_table[first : first + count], 0, context, q.dtype)
        query, target = (x[row : row + count * rows].view(count, rows, *q.shape[1:]) for x in (q, out))
        _flash_attn_fwd(query, k, v, softmax_scale=SCALE, causal=True, pack_gqa=packs, out=target)
        first, row = first + count, row + count * rows


WAYS: dict[str, Callable[..., None]] = {
    "gathered": partial(gathered, packs=False),
    "gathered, packed": partial(gathered, packs=True),
    "dense": partial(dense, packs=False),
    "dense, packed": partial(dense, packs=True),
    "pages": partial(by_pages, packs=False),
    "pages, packed": partial(by_pages, packs=True),
}


def start() -> None:
    """Seconds of the import and of the first call of each way, in a process of its own."""
    begin = time.perf_counter()
    import flash_attn.cute.interface  # noqa: F401

    print(f"import {time.perf_counter() - begin:.1f} s", end="")
    (cache,), meta = make_step(*lengths_of(((2, 300, 300),)), 16)
    q = queries(meta, HEADS)
    for name, way in WAYS.items():
        begin = time.perf_counter()
        way(q, cache, meta, poisoned(q), 0)
        torch.cuda.synchronize()
        print(f", {name} {time.perf_counter() - begin:.1f}", end="", flush=True)
    print()


def check() -> None:
    for runs in CHECKS:
        (cache,), meta = make_step(*lengths_of(runs), 16)
        q = queries(meta, HEADS)
        expected = exact(q, cache, meta)[meta.num_decodes :]
        for name, way in WAYS.items():
            out = poisoned(q)
            way(q, cache, meta, out, meta.num_decodes)
            off = error(out[meta.num_decodes :], expected)
            print(f"{'ok ' if off < 6e-3 else 'BAD'} {name:<20} {runs}: {off:.1e}", flush=True)


def timed(found: dict[str, object]) -> None:
    sizes = (HEADS, KV_HEADS, HEAD, torch.bfloat16, GPU, MAX_ROWS, MAX_CONTEXT, MAX_REQUESTS)
    begin = time.perf_counter()
    count = attention_cudnn.build_plans(*sizes)
    attention_flash.serves = lambda q, meta: False
    print(f"cuDNN: {count} plans in {time.perf_counter() - begin:.1f} s")
    print(f"{'step, ms (TFLOP/s)':<44}" + "".join(f"{name:>19}" for name in ("ours", "Triton", *WAYS)) + "   differs")
    for runs in STEPS:
        name = ", ".join(f"{n} x {rows} + {past}" for n, rows, past in runs)
        (cache,), meta = make_step(*lengths_of(runs), 16)
        q, first = queries(meta, HEADS), meta.num_decodes
        outs = [poisoned(q) for _ in WAYS]
        calls: list[Callable[[], object]] = [partial(run_entry, q, cache, meta)] * 2
        calls += [partial(way, q, cache, meta, out, first) for way, out in zip(WAYS.values(), outs, strict=True)]
        ms = [milliseconds(calls[0])]
        with triton_alone():
            ms.append(milliseconds(calls[1]))
            expected = run_entry(q, cache, meta)
        ms += [milliseconds(call) for call in calls[2:]]
        del calls
        worst = max(error(out[first:], expected[first:]) for out in outs)
        found[name] = ms
        cells = "".join(f"{f'{t:.3f} ({products(runs) / t / 1e9:.0f})':>19}" for t in ms)
        print(f"{name:<44}{cells}   {worst:.0e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="start,check,time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-a-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.as_a_process:
        start()
        return
    parts, found = args.only.split(","), dict[str, object]()
    if "start" in parts:
        for _ in range(2):
            subprocess.run([sys.executable, __file__, "--as-a-process"], check=True)
    if "check" in parts:
        check()
    if "time" in parts:
        timed(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
