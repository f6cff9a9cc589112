"""Head norm, rotation and the write into the cache's pages, in one launch a layer."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.triton import runtime
from octavo.ops.triton.scaled import Scaled, parts

FLOAT8_MAX = 448.0  # of float8_e4m3fn; a larger value would become NaN, so the kernels clamp

_HEADS = 8  # heads a program, so that a token of a small batch still spreads over several multiprocessors


@triton.jit
def to_cache(x, dtype: tl.constexpr, LIMIT: tl.constexpr):
    """x in the cache's type; LIMIT > 0 clamps what that type does not hold."""
    if LIMIT > 0:
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    return x.to(dtype)


@triton.jit
def load_scaled(row, factor, columns, channel, mask):
    """Channels of a row in float32, with the scale of the row and of each channel if the product left them."""
    x = tl.load(row + channel, mask=mask, other=0.0).to(tl.float32)
    if columns is not None:
        x *= tl.load(columns + channel, mask=mask, other=0.0) * factor
    return x


@triton.jit
def _normed_and_rotated(
    x_row, factor, columns, first_channel, heads, live, cos_sin_row, norm, eps, D: tl.constexpr, ROTARY: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HAS_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Channels first and second of each rotated pair [heads, HALF], the rest [heads, REST], and where they lie."""
    pair = tl.arange(0, HALF)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + ROTARY // 2
    in_pair = pair < ROTARY // 2
    rest = ROTARY + tl.arange(0, REST)
    in_rest = rest < D
    head = heads[:, None] * D
    pairs_live, rest_live = live[:, None] & in_pair[None], live[:, None] & in_rest[None]
    a = load_scaled(x_row, factor, columns, first_channel + head + first[None], pairs_live)
    b = load_scaled(x_row, factor, columns, first_channel + head + second[None], pairs_live)
    c = tl.zeros((heads.shape[0], REST), tl.float32)
    if ROTARY < D:
        c = load_scaled(x_row, factor, columns, first_channel + head + rest[None], rest_live)
    if HAS_NORM:
        squares = tl.sum(a * a + b * b, axis=1) + tl.sum(c * c, axis=1)
        inverse = tl.rsqrt(squares / D + eps)[:, None]
        a *= inverse * tl.load(norm + first, mask=in_pair, other=0.0).to(tl.float32)[None]
        b *= inverse * tl.load(norm + second, mask=in_pair, other=0.0).to(tl.float32)[None]
        if ROTARY < D:
            c *= inverse * tl.load(norm + rest, mask=in_rest, other=0.0).to(tl.float32)[None]
    cos = tl.load(cos_sin_row + pair, mask=in_pair, other=0.0).to(tl.float32)[None]
    sin = tl.load(cos_sin_row + ROTARY // 2 + pair, mask=in_pair, other=0.0).to(tl.float32)[None]
    return a * cos - b * sin, b * cos + a * sin, c, first, second, rest, pairs_live, rest_live


@triton.jit
def rotary_kernel(
    qkv, scales, columns, positions, cos_sin, q_norm, k_norm, slots, q_out, k_cache, v_cache, eps, stride_qkv,
    stride_cos, stride_block, stride_head, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token and HEADS heads of one kind (query, key or value) a program.

    scales, columns: of the rows and the columns of qkv, or None.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (HQ + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (HKV + HEADS - 1) // HEADS
    x_row = qkv + token.to(tl.int64) * stride_qkv
    factor = 1.0
    if scales is not None:
        factor = tl.load(scales + token)
    if part < q_parts + kv_parts:
        cos_row = cos_sin + tl.load(positions + token) * stride_cos
        if part < q_parts:
            heads = part * HEADS + tl.arange(0, HEADS)
            a, b, c, first, second, rest, pairs_live, rest_live = _normed_and_rotated(
                x_row, factor, columns, 0, heads, heads < HQ, cos_row, q_norm, eps, D, ROTARY, HALF, REST, Q_NORM,
                INTERLEAVED,
            )  # fmt: skip
            out = q_out + token.to(tl.int64) * (HQ * D) + heads[:, None] * D
            tl.store(out + first[None], a.to(q_out.dtype.element_ty), mask=pairs_live)
            tl.store(out + second[None], b.to(q_out.dtype.element_ty), mask=pairs_live)
            if ROTARY < D:
                tl.store(out + rest[None], c.to(q_out.dtype.element_ty), mask=rest_live)
        else:
            slot = tl.load(slots + token)
            heads = (part - q_parts) * HEADS + tl.arange(0, HEADS)
            if slot >= 0:
                a, b, c, first, second, rest, pairs_live, rest_live = _normed_and_rotated(
                    x_row, factor, columns, HQ * D, heads, heads < HKV, cos_row, k_norm, eps, D, ROTARY, HALF, REST,
                    K_NORM, INTERLEAVED,
                )  # fmt: skip
                out = k_cache + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * D + heads[:, None] * stride_head
                dtype: tl.constexpr = k_cache.dtype.element_ty
                tl.store(out + first[None], to_cache(a, dtype, LIMIT), mask=pairs_live)
                tl.store(out + second[None], to_cache(b, dtype, LIMIT), mask=pairs_live)
                if ROTARY < D:
                    tl.store(out + rest[None], to_cache(c, dtype, LIMIT), mask=rest_live)
    else:
        slot = tl.load(slots + token)
        heads = (part - q_parts - kv_parts) * HEADS + tl.arange(0, HEADS)
        if slot >= 0:
            d = tl.arange(0, BLOCK_D)
            live = (heads < HKV)[:, None] & (d < D)[None]
            v = load_scaled(x_row, factor, columns, (HQ + HKV) * D + heads[:, None] * D + d[None], live)
            out = v_cache + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * D + heads[:, None] * stride_head
            tl.store(out + d[None], to_cache(v, v_cache.dtype.element_ty, LIMIT), mask=live)


@triton.jit
def store_kernel(
    k, v, slots, k_cache, v_cache, stride_k, stride_v, stride_block, stride_head, HKV: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token and HEADS key heads a program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    if slot >= 0:
        d = tl.arange(0, BLOCK_D)
        live = (heads < HKV)[:, None] & (d < D)[None]
        channel = heads[:, None] * D + d[None]
        k_in = tl.load(k + token.to(tl.int64) * stride_k + channel, mask=live, other=0.0).to(tl.float32)
        v_in = tl.load(v + token.to(tl.int64) * stride_v + channel, mask=live, other=0.0).to(tl.float32)
        out = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * D + heads[:, None] * stride_head + d[None]
        tl.store(k_cache + out, to_cache(k_in, k_cache.dtype.element_ty, LIMIT), mask=live)
        tl.store(v_cache + out, to_cache(v_in, v_cache.dtype.element_ty, LIMIT), mask=live)


def rotary_and_store(
    qkv: Tensor | Scaled,
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
    """As `octavo.ops.rotary_and_store`; float32 between the norm and the rotation; slots below 0 are not written."""
    qkv, scales, columns = parts(qkv)
    rotary = cos_sin.shape[1]
    if cache.interleaved or qkv.stride(1) != 1 or rotary > head_dim:
        return NotImplemented
    tokens = qkv.shape[0]
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    programs = -(-num_heads // _HEADS) + 2 * -(-num_kv_heads // _HEADS)
    pdl = runtime.uses_dependent_launch(qkv.device)
    rotary_kernel[(tokens, programs)](
        qkv, scales, columns, positions, cos_sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        meta.slot_mapping, q, cache.k, cache.v, eps, qkv.stride(0), cos_sin.stride(0), cache.k.stride(0),
        cache.k.stride(1), HQ=num_heads, HKV=num_kv_heads, D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        ROTARY=rotary, HALF=triton.next_power_of_2(max(rotary // 2, 1)),
        REST=triton.next_power_of_2(max(head_dim - rotary, 1)), HEADS=_HEADS, BLOCK_SIZE=cache.block_size,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, INTERLEAVED=interleaved, LIMIT=clamp_limit(cache),
        PDL=pdl, launch_pdl=pdl, num_warps=2,
    )  # fmt: skip
    return q


def store_kv(k: Tensor, v: Tensor, cache: KVCache, meta: AttentionMetadata) -> Any:
    """As `octavo.ops.store_kv`; slots below 0 are not written."""
    tokens, heads, head_dim = k.shape
    if cache.interleaved or any(x.stride()[1:] != (head_dim, 1) for x in (k, v)):
        return NotImplemented
    if tokens == 0:
        return None
    pdl = runtime.uses_dependent_launch(k.device)
    store_kernel[(tokens, -(-heads // _HEADS))](
        k, v, meta.slot_mapping, cache.k, cache.v, k.stride(0), v.stride(0), cache.k.stride(0), cache.k.stride(1),
        HKV=heads, D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), HEADS=_HEADS, BLOCK_SIZE=cache.block_size,
        LIMIT=clamp_limit(cache), PDL=pdl, launch_pdl=pdl, num_warps=2,
    )  # fmt: skip
    return None


def clamp_limit(cache: KVCache) -> float:
    """The largest magnitude that the cache holds where a larger one would be NaN, else 0 (no clamp)."""
    return FLOAT8_MAX if cache.dtype == torch.float8_e4m3fn else 0.0
