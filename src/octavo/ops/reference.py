"""Plain torch definitions of the operations: what every faster version is tested against.

All arithmetic is float32 inside, rounded once to the dtype of the input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.kv_cache import AttentionMetadata, KVCache


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()
    if out is None:
        return y.to(x.dtype)
    return out.copy_(y)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] channels of x [T, heads, D] (float32) by the angles of each token [T, R]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotary[..., 0::2], rotary[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotary[..., :half], rotary[..., half:]
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((rotated, rest), dim=-1)


def rotary_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool,
) -> Tensor:
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    cos, sin = cos_sin[positions].float().chunk(2, dim=-1)
    q = rotate(q.float(), cos, sin, interleaved).to(qkv.dtype)
    k = rotate(k.float(), cos, sin, interleaved).to(qkv.dtype)
    store_kv(k, v, cache, meta)
    return q


def store_kv(k: Tensor, v: Tensor, cache: KVCache, meta: AttentionMetadata) -> None:
    if cache.dtype == torch.float8_e4m3fn:  # what is larger becomes the largest, not NaN, whatever torch does
        k, v = (x.clamp(-LARGEST_CODE["fp8"], LARGEST_CODE["fp8"]) for x in (k, v))
    cache.scatter(meta.slot_mapping, k, v)


def paged_attention(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    out = torch.empty_like(q)
    starts, lengths = meta.query_start.tolist(), meta.seq_lens.tolist()
    for s, length in enumerate(lengths):
        rows = slice(starts[s], starts[s + 1])
        first_query = length - (rows.stop - rows.start)
        first_block = 0 if window is None else max(0, first_query - window + 1) // cache.block_size
        last_block = -(-length // cache.block_size)
        k, v = cache.gather(meta.block_table[s, first_block:last_block].long())
        start = first_block * cache.block_size
        k, v = k[:, : length - start], v[:, : length - start]
        visible = _visible(first_query, length, start, window, q.device)
        out[rows] = _attend(q[rows], k, v, visible, scale, softcap, sinks)
    return out.flatten(1)


def _visible(first_query: int, length: int, start: int, window: int | None, device: torch.device) -> Tensor:
    """Mask [rows, keys]: a query at position p sees the keys p - window < j <= p."""
    query = torch.arange(first_query, length, device=device)[:, None]
    key = torch.arange(start, length, device=device)[None]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax attention of q [R, Hq, D] over k, v [Hkv, L, D]; Hq / Hkv query heads share a key head."""
    groups = q.shape[1] // k.shape[0]
    q = q.float().unflatten(1, (k.shape[0], groups)).permute(1, 2, 0, 3)  # [Hkv, groups, R, D]
    scores = torch.matmul(q, k.float().mT[:, None]) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:  # one more score a head that takes part in the softmax and has no value
        extra = sinks.float().view(k.shape[0], groups, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, extra), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    out = torch.matmul(weights, v.float()[:, None])  # [Hkv, groups, R, D]
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(v.dtype)


def quantize_rows(x: Tensor, kind: str = "int8", fixed: float | None = None) -> tuple[Tensor, Tensor]:
    """Symmetric 8-bit codes [T, K] and float32 scales [T, 1], one a row, as serving engines round dynamic tokens.

    "int8": the largest magnitude maps to 127, as in vLLM's kernels (compressed-tensors' own simulation divides by
    127.5, and clamps); codes are rounded to nearest, ties to even. "fp8": the largest magnitude maps to 448, the
    largest E4M3 number, and x / scale is rounded to float8_e4m3fn to nearest, ties to even. The quotients are those of
    float32. `fixed` is a static scale: every row has it, and what lies beyond the largest code becomes that code.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    # Torch multiplies by the reciprocal where the divisor is a number on a GPU, which is not the same quotient.
    scale = (largest / torch.full_like(largest, LARGEST_CODE[kind])).clamp(min=torch.finfo(torch.float32).tiny)
    if fixed is not None:
        scale = torch.full_like(largest, fixed)
    if kind == "fp8":
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
    return torch.round(x / scale).clamp(-128, 127).to(torch.int8), scale


LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}
