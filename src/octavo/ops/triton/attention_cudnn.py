"""Long chunks through cuDNN's attention, which is faster than a Triton kernel where the products count.

cuDNN reads contiguous keys, and its causal mask starts at the first key. So the pages of requests are gathered, the
chunk attends to what came before it without a mask and to itself with one, and the two outputs are merged by their
log-sum-exp (as in FlashAttention's split-KV). Requests of equal lengths share the calls. Everything runs on lengths
that the host knows.

torch builds a plan for every new shape, which takes 50 to 130 ms. TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 lets it pass
the lengths in tensors and round the shapes of plans up to powers of two; that needs rows of all heads, [B, L, H, D] in
memory. (Its variable-length form, `_cudnn_attention_forward`, would take unequal lengths, but torch 2.11 builds that
plan anew in every call.)
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.kv_cache import AttentionMetadata, KVCache

MIN_ROWS = 256  # fewer rows leave multiprocessors without work
MIN_SCORES = 80_000_000  # from as many on, the products save more than gathering and small launches cost
MIN_SCORES_WITH_PAST = 1_000_000_000  # two calls and a merge a request: 4 x 1,024 after 1,024 took three times Triton's


@triton.jit(do_not_specialize=["first", "count", "stride_table"], do_not_specialize_on_alignment=["tables"])
def gather_kernel(
    k_cache, v_cache, tables, k_out, v_out, first, count, stride_table, stride_block, stride_head, HKV: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys and values of one head of a request, BLOCK_N tokens a program, to [requests, count, Hkv, D]."""
    head, request = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    keys = first + n
    mask = (n < count)[:, None] & (d < D)[None]
    pages = tl.load(tables + request * stride_table + keys // BLOCK_SIZE, mask=n < count, other=0).to(tl.int64)
    source = (pages * stride_block + head * stride_head + keys % BLOCK_SIZE * D)[:, None] + d[None]
    target = ((request * count + n) * HKV + head)[:, None] * D + d[None]
    tl.store(k_out + target, tl.load(k_cache + source, mask=mask, other=0.0).to(k_out.dtype.element_ty), mask=mask)
    tl.store(v_out + target, tl.load(v_cache + source, mask=mask, other=0.0).to(v_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "lse_head", "lse_row"])
def merge_kernel(
    past, past_lse, chunk, chunk_lse, out, num_rows, past_head, past_row, chunk_head, chunk_row, lse_head, lse_row,
    out_row, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Two outputs over disjoint keys, each normalized, weighted by how much of the softmax each holds."""
    head = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < num_rows
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d < D)[None]
    lse_a = tl.load(past_lse + head * lse_head + rows * lse_row, mask=live, other=0.0)
    lse_b = tl.load(chunk_lse + head * lse_head + rows * lse_row, mask=live, other=0.0)
    share = (1.0 / (1.0 + tl.exp(lse_b - lse_a)))[:, None]
    a = tl.load(past + head * past_head + rows[:, None] * past_row + d[None], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(chunk + head * chunk_head + rows[:, None] * chunk_row + d[None], mask=mask, other=0.0).to(tl.float32)
    merged = a * share + b * (1.0 - share)
    tl.store(out + rows[:, None] * out_row + head * D + d[None], merged.to(out.dtype.element_ty), mask=mask)


def serves(q: Tensor, meta: AttentionMetadata) -> bool:
    """Whether chunks of this step may come here; the step's mask must be plainly causal."""
    if meta.query_lens_host is None or meta.seq_lens_host is None:
        return False
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] in (64, 80, 96, 128)
    return q.is_cuda and fits and not torch.cuda.is_current_stream_capturing()


def pays(heads: int, rows: int, context: int, count: int) -> bool:
    """Whether `count` requests of `rows` new tokens at the end of contexts of this length are long enough."""
    least = MIN_SCORES if rows == context else MIN_SCORES_WITH_PAST
    return rows >= MIN_ROWS and count * heads * rows * (context - rows // 2) >= least


def gather(cache: KVCache, tables: Tensor, first: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [B, count, Hkv, D] of the tokens from `first` on in block tables [B, ...], in `dtype`."""
    requests = tables.shape[0]
    shape = (requests, count, cache.num_kv_heads, cache.head_dim)
    k, v = (torch.empty(shape, dtype=dtype, device=tables.device) for _ in range(2))
    gather_kernel[(-(-count // 64), cache.num_kv_heads, requests)](
        cache.k, cache.v, tables, k, v, first, count, tables.stride(0), cache.k.stride(0), cache.k.stride(1),
        HKV=cache.num_kv_heads, D=cache.head_dim, BLOCK_D=triton.next_power_of_2(cache.head_dim), BLOCK_N=64,
        BLOCK_SIZE=cache.block_size, num_warps=4,
    )  # fmt: skip
    return k, v


def merge(past: Tensor, past_lse: Tensor, chunk: Tensor, chunk_lse: Tensor, out: Tensor) -> None:
    """out [R, Hq * D] of two outputs [Hq, R, D] over disjoint keys and their log-sum-exp [Hq, R], natural logarithm."""
    heads, rows, head_dim = past.shape
    assert past_lse.stride() == chunk_lse.stride() and past.stride(2) == chunk.stride(2) == 1
    merge_kernel[(-(-rows // 16), heads)](
        past, past_lse, chunk, chunk_lse, out, rows, past.stride(0), past.stride(1), chunk.stride(0), chunk.stride(1),
        past_lse.stride(0), past_lse.stride(1), out.stride(0), D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        ROWS=16, num_warps=4,
    )  # fmt: skip


@functools.cache
def _keep_plans() -> None:
    """Ask torch for plans by rounded shapes; it reads the variable in the first call of cuDNN's attention."""
    os.environ.setdefault("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")


def _cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, Hq, R, D] and log-sum-exp [B, Hq, R] of q [B, R, Hq, D] over k, v [B, L, Hkv, D]."""
    _keep_plans()
    output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, is_causal, False, scale=scale
    )
    return output, lse.squeeze(-1) if lse.dim() == 4 else lse


def build_plans(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, max_rows: int, max_context: int
) -> None:
    """Build the plans that long prompts of one request will ask for, some 60 ms each; a thread has plans of its own.

    Chunks of `max_rows` tokens are cut short by decodes and by the ends of prompts, so each power of two down to an
    eighth of it gets one, alone and after each power of two of context down to the same.
    """

    def some(bucket: int, n: int) -> Tensor:  # just over half of a bucket rounds up to it, and computes the least
        return torch.empty(1, bucket // 2 + 1, n, head_dim, dtype=dtype, device=device)

    most = triton.next_power_of_2(max_rows)
    for rows in (most, most // 2, most // 4, most // 8):
        if rows >= MIN_ROWS:
            _cudnn(some(rows, heads), some(rows, kv_heads), some(rows, kv_heads), True, head_dim**-0.5)
            past = triton.next_power_of_2(max_context)
            while past >= most // 8:
                _cudnn(some(rows, heads), some(past, kv_heads), some(past, kv_heads), False, head_dim**-0.5)
                past //= 2


def attend_requests(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    out: Tensor,
    first: int,
    count: int,
    first_row: int,
    scale: float,
) -> None:
    """Write rows `first_row`.. of `out` [T, Hq * D]: those of `count` requests of equal lengths from `first` on."""
    assert meta.query_lens_host is not None and meta.seq_lens_host is not None
    rows, past = meta.query_lens_host[first], meta.seq_lens_host[first] - meta.query_lens_host[first]
    heads, head_dim = q.shape[1:]
    query = q[first_row : first_row + count * rows].view(count, rows, heads, head_dim)
    target = out[first_row : first_row + count * rows].view(count, rows, heads * head_dim)
    tables = meta.block_table[first : first + count]
    chunk, chunk_lse = _cudnn(query, *gather(cache, tables, past, rows, q.dtype), True, scale)
    if past == 0:
        target.view(query.shape).copy_(chunk.transpose(1, 2))
        return
    before, before_lse = _cudnn(query, *gather(cache, tables, 0, past, q.dtype), False, scale)
    for i in range(count):
        merge(before[i], before_lse[i], chunk[i], chunk_lse[i], target[i])
