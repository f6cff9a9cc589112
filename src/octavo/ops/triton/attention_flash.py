"""Chunks of any lengths through FlashAttention 4 (Dao et al.; package `flash-attn-4`), where it is installed.

One call takes all chunks of a step, whatever their lengths and pasts, where cuDNN takes several and a merge. Its
kernel for Hopper reads keys in order, by the copy engine; pages of 16 tokens it would read by single copies, 10 to 25 %
slower for long prompts, so they are gathered before. A request's keys fill whole tiles there, the last one with zeros:
a tile that reached into the next request's would make NaN of what is infinite there, although its weight is 0.

H200, 2026-11-30, 32 and 8 heads of 128, ms, gathering included, beside cuDNN and the Triton kernel: 16,384 rows 3.0
(3.3, 5.8), 13,616 after 16,384 and 2,768 alone 7.9 (9.3, 13.7), 32 x 512 after 1,536 0.92 (-, 1.45), 16 x 1,000 0.39
(-, 0.57).
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.kv_cache import AttentionMetadata, KVCache

logger = logging.getLogger(__name__)

KEY_TILE = 128  # keys of a tile, of which a request has whole ones; more than a tile of the package's does no harm
MIN_SCORES = 1 << 22  # of rows and keys: with fewer, the host's time for the call counts
MAX_REQUESTS = 256  # with more, the package launches further kernels, which it would compile in the middle of a step
MAX_KEYS = 1 << 17  # 0.5 GB of keys and values of 8 heads of 128: room for them is not kept at the engine's start


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["tables", "key_start", "lengths"])
def gather_kernel(
    k_cache, v_cache, tables, key_start, lengths, k_out, v_out, stride_table, stride_block, stride_head,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys and values of one head of a request, BLOCK_N tokens a program, to rows from key_start[r] on of [K, Hkv, D].

    Rows beyond the request's length, up to key_start[r + 1], get zeros.
    """
    head, request = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first = tl.load(key_start + request)
    room = tl.load(key_start + request + 1) - first
    if tl.program_id(0) * BLOCK_N >= room:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    is_key = n < tl.load(lengths + request)
    read = is_key[:, None] & (d < D)[None]
    write = (n < room)[:, None] & (d < D)[None]
    pages = tl.load(tables + request * stride_table + n // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    source = (pages * stride_block + head * stride_head + n % BLOCK_SIZE * D)[:, None] + d[None]
    target = (((first + n).to(tl.int64) * HKV + head) * D)[:, None] + d[None]
    tl.store(k_out + target, tl.load(k_cache + source, mask=read, other=0.0).to(k_out.dtype.element_ty), mask=write)
    tl.store(v_out + target, tl.load(v_cache + source, mask=read, other=0.0).to(v_out.dtype.element_ty), mask=write)


def key_rows(lengths: Tensor) -> Tensor:
    """Where each request's keys begin, int32 [S + 1], when all have whole tiles; `lengths` int32 [S]."""
    rooms = (lengths + (KEY_TILE - 1)) // KEY_TILE * KEY_TILE
    return torch.nn.functional.pad(rooms.cumsum(0, dtype=torch.int32), (1, 0))


def gather(
    cache: KVCache, tables: Tensor, lengths: Tensor, key_start: Tensor, lengths_host: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values [K, Hkv, D] of requests with block tables [S, ...], those of request s from key_start[s] on."""
    rooms = [-(-length // KEY_TILE) * KEY_TILE for length in lengths_host]
    shape = (sum(rooms), cache.num_kv_heads, cache.head_dim)
    k, v = (torch.empty(shape, dtype=dtype, device=tables.device) for _ in range(2))
    gather_kernel[(max(rooms) // 64, cache.num_kv_heads, tables.shape[0])](
        cache.k, cache.v, tables, key_start, lengths, k, v, tables.stride(0), cache.k.stride(0), cache.k.stride(1),
        HKV=cache.num_kv_heads, D=cache.head_dim, BLOCK_D=triton.next_power_of_2(cache.head_dim), BLOCK_N=64,
        BLOCK_SIZE=cache.block_size, num_warps=4,
    )  # fmt: skip
    return k, v


@functools.cache
def load() -> Any:
    """The package's function for requests of any lengths, or None where it cannot be used.

    Importing it takes seconds, so an engine does so at its start (`prepare`).
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # compiled kernels are kept beside Triton's
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path(triton.knobs.cache.dir) / "flash-attn-4"))
    begin = time.perf_counter()
    try:
        with _without_tracer():
            from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        logger.info("long prompts run without FlashAttention 4 (pip install 'octavo[flash]'): %s", error)
        return None
    logger.info("imported FlashAttention 4 in %.1f s", time.perf_counter() - begin)
    return flash_attn_varlen_func


@contextmanager
def _without_tracer() -> Iterator[None]:
    """`torch.compiler.disable` marks nothing inside.

    It would import torch._dynamo: 1.5 s of 2.5 on the CPU where that was measured. The package's dependency `quack`
    marks two functions of a tuner with it, which only matters to who traces them with torch.compile.
    """

    def mark(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        return mark if fn is None else fn

    disable = torch.compiler.disable
    torch.compiler.disable = mark  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler.disable = disable


def fits(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel takes such heads, here."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim in (64, 80, 96, 128) and load() is not None


def serves(q: Tensor, meta: AttentionMetadata) -> bool:
    """Whether the chunks of this step come here; the step's mask must be plainly causal."""
    if meta.query_lens_host is None or meta.seq_lens_host is None or not q.is_cuda:
        return False
    first = meta.num_decodes
    if not pays(meta.query_lens_host[first:], meta.seq_lens_host[first:]) or not fits(q.dtype, q.shape[2]):
        return False
    return not torch.cuda.is_current_stream_capturing()


def pays(lengths: list[int], contexts: list[int]) -> bool:
    """Whether chunks of so many new tokens, and of tokens in all, are worth a call that takes them together."""
    if not 0 < len(lengths) <= MAX_REQUESTS or sum(contexts) > MAX_KEYS:
        return False
    return sum(rows * context for rows, context in zip(lengths, contexts, strict=True)) >= MIN_SCORES


def attend(q: Tensor, cache: KVCache, meta: AttentionMetadata, scale: float) -> Tensor:
    """Output [T, Hq * D] of q [T, Hq, D]; rows of the step's decodes are left unwritten."""
    assert meta.seq_lens_host is not None
    first = meta.num_decodes
    lengths = meta.seq_lens[first:]
    if meta.key_rows is None:  # the same in all layers
        meta.key_rows = key_rows(lengths)
    k, v = gather(cache, meta.block_table[first:], lengths, meta.key_rows, meta.seq_lens_host[first:], q.dtype)
    return _attend(q, k, v, meta.query_start[first:], meta.key_rows, lengths, scale)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, key_start: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    # Not told how long the longest request is, the package compiles one kernel for all. Query heads that share a key
    # head keep tiles of their own: 2 to 10 % faster for long prompts, and equal for others.
    out, _ = load()(
        q, k, v, cu_seqlens_q=query_start, cu_seqlens_k=key_start, seqused_k=lengths, softmax_scale=scale, causal=True,
        pack_gqa=False,
    )  # fmt: skip
    return out.flatten(1)  # type: ignore[no-any-return]


def prepare(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Have the kernel for these heads compiled, some 4 s, or read from disk."""
    q, k = (torch.zeros(KEY_TILE, n, head_dim, dtype=dtype, device=device) for n in (heads, kv_heads))
    ends = torch.tensor([0, KEY_TILE], dtype=torch.int32, device=device)
    _attend(q, k, k.clone(), ends, ends, ends[1:], head_dim**-0.5)
