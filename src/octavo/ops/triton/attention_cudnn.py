"""Long chunks through cuDNN's attention, which is faster than a Triton kernel where the products count.

cuDNN reads contiguous keys, and its causal mask starts at the first key. So the pages of requests are gathered, the
chunk attends to what came before it without a mask and to itself with one, and the two outputs are merged by their
log-sum-exp (as in FlashAttention's split-KV). Prompts of equal lengths share a call. Everything runs on lengths that
the host knows; `attention_plans` says which calls there are.

torch builds a plan for every new shape. TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 lets it pass the lengths in tensors and
round the shapes of plans up to powers of two; that needs rows of all heads, [B, L, H, D] in memory. Where many rows
are a power of two anyway, keys in another order, [B, H, L, D], get a plan without lengths in tensors, which is faster:
8 x 2,048, 32 heads, 0.53 ms against 0.61, and 0.92 in Triton; 16,384 3.7 against 4.1 (H200, 2026-11-30). (The
variable-length form, `_cudnn_attention_forward`, would take unequal lengths, but torch 2.11 builds that plan anew in
every call.)
"""

from __future__ import annotations

import functools
import os
import warnings

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import attention_plans


@triton.jit(do_not_specialize=["first", "count", "stride_table"], do_not_specialize_on_alignment=["tables"])
def gather_kernel(
    k_cache, v_cache, tables, k_out, v_out, first, count, stride_table, stride_block, stride_head, HKV: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """Keys and values of one head of a request, BLOCK_N tokens a program, to [requests, count, Hkv, D].

    With HEADS_FIRST to [requests, Hkv, count, D].
    """
    head, request = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    keys = first + n
    mask = (n < count)[:, None] & (d < D)[None]
    pages = tl.load(tables + request * stride_table + keys // BLOCK_SIZE, mask=n < count, other=0).to(tl.int64)
    source = (pages * stride_block + head * stride_head + keys % BLOCK_SIZE * D)[:, None] + d[None]
    row = (request * HKV + head) * count + n if HEADS_FIRST else (request * count + n) * HKV + head
    target = row[:, None] * D + d[None]
    tl.store(k_out + target, tl.load(k_cache + source, mask=mask, other=0.0).to(k_out.dtype.element_ty), mask=mask)
    tl.store(v_out + target, tl.load(v_cache + source, mask=mask, other=0.0).to(v_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "past_lse_head", "past_lse_row", "chunk_lse_head", "chunk_lse_row"])
def merge_kernel(
    past, past_lse, chunk, chunk_lse, out, num_rows, past_head, past_row, chunk_head, chunk_row, past_lse_head,
    past_lse_row, chunk_lse_head, chunk_lse_row, out_row, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Two outputs over disjoint keys, each normalized, weighted by how much of the softmax each holds."""
    head = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < num_rows
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d < D)[None]
    lse_a = tl.load(past_lse + head * past_lse_head + rows * past_lse_row, mask=live, other=0.0)
    lse_b = tl.load(chunk_lse + head * chunk_lse_head + rows * chunk_lse_row, mask=live, other=0.0)
    share = (1.0 / (1.0 + tl.exp(lse_b - lse_a)))[:, None]
    a = tl.load(past + head * past_head + rows[:, None] * past_row + d[None], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(chunk + head * chunk_head + rows[:, None] * chunk_row + d[None], mask=mask, other=0.0).to(tl.float32)
    merged = a * share + b * (1.0 - share)
    tl.store(out + rows[:, None] * out_row + head * D + d[None], merged.to(out.dtype.element_ty), mask=mask)


def serves(q: Tensor, meta: AttentionMetadata) -> bool:
    """Whether chunks of this step may come here; the step's mask must be plainly causal."""
    if (
        meta.query_lens_host is None
        or meta.seq_lens_host is None
        or meta.max_query_len < attention_plans.MIN_EQUAL_ROWS
    ):
        return False
    return q.is_cuda and _fits(q.dtype, q.shape[2]) and not torch.cuda.is_current_stream_capturing()


def _fits(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and head_dim in (64, 80, 96, 128)


def gather(
    cache: KVCache, tables: Tensor, first: int, count: int, dtype: torch.dtype, heads_first: bool = False
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, count, Hkv, D] of the tokens from `first` on in block tables [B, ...], in `dtype`.

    `heads_first` is their order in memory, [B, Hkv, count, D]; the shape is the same.
    """
    shape = [tables.shape[0], count, cache.num_kv_heads, cache.head_dim]
    k, v = (_empty(shape, dtype, tables.device, heads_first) for _ in range(2))
    gather_kernel[(-(-count // 64), cache.num_kv_heads, tables.shape[0])](
        cache.k, cache.v, tables, k, v, first, count, tables.stride(0), cache.k.stride(0), cache.k.stride(1),
        HKV=cache.num_kv_heads, D=cache.head_dim, BLOCK_D=triton.next_power_of_2(cache.head_dim), BLOCK_N=64,
        BLOCK_SIZE=cache.block_size, HEADS_FIRST=heads_first, num_warps=4,
    )  # fmt: skip
    return k, v


def _empty(shape: list[int], dtype: torch.dtype, device: torch.device, heads_first: bool) -> Tensor:
    """Room for [B, L, H, D], in memory so or with the heads first."""
    batch, length, heads, head_dim = shape
    if heads_first:
        return torch.empty(batch, heads, length, head_dim, dtype=dtype, device=device).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=device)


def merge(past: Tensor, past_lse: Tensor, chunk: Tensor, chunk_lse: Tensor, out: Tensor) -> None:
    """out [R, Hq * D] of two outputs [Hq, R, D] over disjoint keys and their log-sum-exp [Hq, R], natural logarithm."""
    heads, rows, head_dim = past.shape
    assert past.stride(2) == chunk.stride(2) == 1
    merge_kernel[(-(-rows // 16), heads)](
        past, past_lse, chunk, chunk_lse, out, rows, past.stride(0), past.stride(1), chunk.stride(0), chunk.stride(1),
        past_lse.stride(0), past_lse.stride(1), chunk_lse.stride(0), chunk_lse.stride(1), out.stride(0), D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), ROWS=16, num_warps=4,
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
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    max_context: int,
    max_requests: int,
) -> int:
    """Build the plans that steps of up to `max_rows` rows will ask for, and return how many.

    Some 160 ms each. A thread of the host has plans of its own, so this must run on the one that runs the steps.
    """
    if not _fits(dtype, head_dim):
        return 0
    plans = attention_plans.plans(heads, max_rows, max_context, max_requests)
    with warnings.catch_warnings():  # torch calls the variable experimental, and names the order that it rounds
        warnings.simplefilter("ignore")
        for plan in plans:  # just over half of a power of two is rounded up to it, and computes the least
            rows, keys = (n if plan.is_exact else n // 2 + 1 for n in (plan.rows, plan.keys))
            q = torch.zeros(plan.batch, rows, heads, head_dim, dtype=dtype, device=device)
            k = _empty([plan.batch, keys, kv_heads, head_dim], dtype, device, plan.is_exact).zero_()
            output, lse = _cudnn(q, k, k, plan.is_causal, head_dim**-0.5)
            merge(output[0], lse[0], output[0], lse[0], q[0].flatten(1))  # compiled, if it is not yet
    return len(plans)


def attend_prompts(
    q: Tensor, cache: KVCache, meta: AttentionMetadata, first: int, count: int, first_row: int, rows: int, scale: float
) -> Tensor:
    """Output [count * rows, Hq * D] of `count` requests without a past from `first` on, `rows` tokens each."""
    query = q[first_row : first_row + count * rows].view(count, rows, *q.shape[1:])
    tables = meta.block_table[first : first + count]
    is_exact = attention_plans.plan_of(count, rows, rows, True).is_exact
    output, _ = _cudnn(query, *gather(cache, tables, 0, rows, q.dtype, is_exact), True, scale)
    return output.transpose(1, 2).reshape(count * rows, -1)


def attend_after_past(
    q: Tensor, cache: KVCache, meta: AttentionMetadata, out: Tensor, request: int, first_row: int, rows: int,
    context: int, scale: float,
) -> None:  # fmt: skip
    """Write rows `first_row`.. of `out` [T, Hq * D]: the last `rows` tokens of a request whose context is longer."""
    past = context - rows
    query = q[first_row : first_row + rows][None]
    tables = meta.block_table[request : request + 1]
    is_exact = attention_plans.plan_of(1, rows, rows, True).is_exact
    chunk, chunk_lse = _cudnn(query, *gather(cache, tables, past, rows, q.dtype, is_exact), True, scale)
    before, before_lse = _cudnn(query, *gather(cache, tables, 0, past, q.dtype), False, scale)
    merge(before[0], before_lse[0], chunk[0], chunk_lse[0], out[first_row : first_row + rows])
