"""Long chunks through cuDNN's attention, which is faster than a Triton kernel where the products count.

cuDNN reads contiguous keys, and its causal mask starts at the first key. So the pages of a request are gathered, the
chunk attends to what came before it without a mask and to itself with one, and the two outputs are merged by their
log-sum-exp (as in FlashAttention's split-KV). Everything runs on lengths that the host knows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.kv_cache import AttentionMetadata, KVCache

MIN_ROWS = 1024  # rows of a chunk from which this is worth the gathering


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["blocks"])
def gather_kernel(
    k_cache, v_cache, blocks, k_out, v_out, length, stride_block, stride_head, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys and values of one request, BLOCK_N tokens of one head a program, to [Hkv, length, D]."""
    head = tl.program_id(1).to(tl.int64)
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    mask = (keys < length)[:, None] & (d < D)[None]
    pages = tl.load(blocks + keys // BLOCK_SIZE, mask=keys < length, other=0).to(tl.int64)
    source = (pages * stride_block + head * stride_head + keys % BLOCK_SIZE * D)[:, None] + d[None]
    target = (head * length + keys)[:, None] * D + d[None]
    tl.store(k_out + target, tl.load(k_cache + source, mask=mask, other=0.0).to(k_out.dtype.element_ty), mask=mask)
    tl.store(v_out + target, tl.load(v_cache + source, mask=mask, other=0.0).to(v_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "lse_head"])
def merge_kernel(
    past, past_lse, chunk, chunk_lse, out, num_rows, past_head, past_row, chunk_head, chunk_row, lse_head, out_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Two outputs over disjoint keys, each normalized, weighted by how much of the softmax each holds."""
    head = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < num_rows
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d < D)[None]
    lse_a = tl.load(past_lse + head * lse_head + rows, mask=live, other=0.0)
    lse_b = tl.load(chunk_lse + head * lse_head + rows, mask=live, other=0.0)
    share = (1.0 / (1.0 + tl.exp(lse_b - lse_a)))[:, None]
    a = tl.load(past + head * past_head + rows[:, None] * past_row + d[None], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(chunk + head * chunk_head + rows[:, None] * chunk_row + d[None], mask=mask, other=0.0).to(tl.float32)
    merged = a * share + b * (1.0 - share)
    tl.store(out + rows[:, None] * out_row + head * D + d[None], merged.to(out.dtype.element_ty), mask=mask)


def serves(q: Tensor, meta: AttentionMetadata) -> bool:
    """Whether a chunk of this step should come here; the step's mask must be plainly causal."""
    lengths = meta.query_lens_host
    if lengths is None or meta.seq_lens_host is None or max(lengths) < MIN_ROWS:
        return False
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] in (64, 80, 96, 128)
    return q.is_cuda and fits and not torch.cuda.is_current_stream_capturing()


def gather(cache: KVCache, blocks: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [Hkv, length, D] of the first `length` tokens in these blocks, in `dtype`."""
    shape = (cache.num_kv_heads, length, cache.head_dim)
    k, v = (torch.empty(shape, dtype=dtype, device=blocks.device) for _ in range(2))
    gather_kernel[(-(-length // 64), cache.num_kv_heads)](
        cache.k, cache.v, blocks, k, v, length, cache.k.stride(0), cache.k.stride(1), D=cache.head_dim,
        BLOCK_D=triton.next_power_of_2(cache.head_dim), BLOCK_N=64, BLOCK_SIZE=cache.block_size, num_warps=4,
    )  # fmt: skip
    return k, v


def merge(past: Tensor, past_lse: Tensor, chunk: Tensor, chunk_lse: Tensor, out: Tensor) -> None:
    """out [R, Hq * D] of two outputs [Hq, R, D] over disjoint keys and their log-sum-exp [Hq, R], natural logarithm."""
    heads, rows, head_dim = past.shape
    past_lse, chunk_lse = past_lse.reshape(heads, rows), chunk_lse.reshape(heads, rows)
    assert past_lse.stride() == chunk_lse.stride() == (rows, 1) and past.stride(2) == chunk.stride(2) == 1
    merge_kernel[(-(-rows // 16), heads)](
        past, past_lse, chunk, chunk_lse, out, rows, past.stride(0), past.stride(1), chunk.stride(0), chunk.stride(1),
        rows, out.stride(0), D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), ROWS=16, num_warps=4,
    )  # fmt: skip


def _cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output [Hq, R, D] and log-sum-exp [Hq, R, ...] of q [Hq, R, D] over k, v [Hkv, L, D]; cuDNN shares the heads."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q[None], k[None], v[None], None, True, 0.0, is_causal, False, scale=scale
    )
    return output[0], lse[0]


def attend_request(
    q: Tensor, cache: KVCache, meta: AttentionMetadata, out: Tensor, request: int, first_row: int, scale: float
) -> None:
    """Write the rows of one request of `out` [T, Hq * D]; its first row is `first_row`, its lengths are on the host."""
    assert meta.query_lens_host is not None and meta.seq_lens_host is not None
    rows, length = meta.query_lens_host[request], meta.seq_lens_host[request]
    query = q[first_row : first_row + rows].transpose(0, 1)  # [Hq, R, D]
    target = out[first_row : first_row + rows]
    k, v = gather(cache, meta.block_table[request], length, q.dtype)
    past = length - rows
    chunk, chunk_lse = _cudnn(query, k[:, past:], v[:, past:], True, scale)
    if past == 0:
        target.view(rows, *q.shape[1:]).copy_(chunk.transpose(0, 1))
        return
    before, before_lse = _cudnn(query, k[:, :past], v[:, :past], False, scale)
    merge(before, before_lse, chunk, chunk_lse, target)
