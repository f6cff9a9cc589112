"""The fused head norm, rotation and store against the reference."""

from __future__ import annotations

import pytest
import torch
from paged import TOLERANCE, Step, relative_error
from torch import Tensor

from octavo import ops
from octavo.ops import reference
from octavo.ops.triton.rotary import rotary_and_store, store_kv
from octavo.ops.triton.scaled import Scaled


def inputs(step: Step, heads: int, rotary: int, norms: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    device, d, generator = step.positions.device, step.cache.head_dim, torch.Generator().manual_seed(2)
    qkv = torch.randn(step.num_rows, (heads + 2 * step.cache.num_kv_heads) * d, generator=generator).to(dtype)
    angles = torch.arange(max(step.lengths))[:, None] * torch.rand(rotary // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    weights = [torch.randn(d, generator=generator).to(dtype) if norms else None for _ in range(2)]
    return tuple(None if x is None else x.to(device) for x in (qkv, cos_sin, *weights))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "heads", "head_dim", "rotary"),
    [(8, 32, 128, 128), (3, 9, 64, 64), (1, 2, 80, 32), (2, 2, 96, 96), (1, 1, 32, 8)],
)
def test_rotary_and_store_is_the_reference(
    kv_heads: int, heads: int, head_dim: int, rotary: int, norms: bool, interleaved: bool, device: torch.device
) -> None:
    step = Step([1, 4], [20, 30], 16, kv_heads, head_dim, device)
    qkv, cos_sin, q_norm, k_norm = inputs(step, heads, rotary, norms)
    shape = (heads, kv_heads, head_dim)
    expected = ops.KVCache(step.cache.k.float(), step.cache.v.float(), interleaved=False)
    exact = [None if x is None else x.float() for x in (q_norm, k_norm)]
    args = (step.positions, cos_sin)
    q_expected = reference.rotary_and_store(
        qkv.float(), *args, expected, step.meta, *shape, exact[0], exact[1], 1e-5, interleaved
    )
    q = rotary_and_store(qkv, *args, step.cache, step.meta, *shape, q_norm, k_norm, 1e-5, interleaved)
    assert q.shape == (5, heads, head_dim)
    assert relative_error(q, q_expected) < TOLERANCE
    for ours, theirs in ((step.cache.k, expected.k), (step.cache.v, expected.v)):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert relative_error(ours.nan_to_num(), theirs.nan_to_num()) < TOLERANCE


@pytest.mark.parametrize("norms", [False, True])
def test_scales_that_a_product_left_are_applied(norms: bool, device: torch.device) -> None:
    step = Step([1, 4], [20, 30], 16, 2, 80, device)
    qkv, cos_sin, *weights = inputs(step, 4, 32, norms, torch.float32)
    generator = torch.Generator().manual_seed(6)
    row, column = (torch.rand(size, generator=generator).to(device) for size in ((5, 1), (qkv.shape[1],)))
    expected = ops.KVCache(step.cache.k.clone(), step.cache.v.clone(), interleaved=False)
    rest = (step.meta, 4, 2, 80, *weights, 1e-5, False)
    q_expected = reference.rotary_and_store(qkv * column * row, step.positions, cos_sin, expected, *rest)
    q = rotary_and_store(Scaled(qkv, row, column), step.positions, cos_sin, step.cache, *rest)
    assert relative_error(q, q_expected) < TOLERANCE
    for ours, theirs in ((step.cache.k, expected.k), (step.cache.v, expected.v)):
        assert relative_error(ours.nan_to_num(), theirs.nan_to_num()) < TOLERANCE


@pytest.mark.parametrize("fused", [False, True])
def test_padding_is_not_written(fused: bool, device: torch.device) -> None:
    step = Step([1, 1], [5, 0], 16, 2, 32, device)
    before = step.cache.k.clone(), step.cache.v.clone()
    qkv, cos_sin, *_ = inputs(step, 4, 32, False)
    if fused:
        rotary_and_store(qkv, step.positions, cos_sin, step.cache, step.meta, 4, 2, 32, None, None, 1e-6, False)
    else:
        k, v = qkv[:, 128:].unflatten(1, (4, 32)).split(2, dim=1)
        store_kv(k, v, step.cache, step.meta)
    page, offset = int(step.meta.block_table[0, 0]), 4
    for old, new in zip(before, (step.cache.k, step.cache.v), strict=True):
        assert not torch.equal(old[page, :, offset], new[page, :, offset])
        old[page, :, offset] = new[page, :, offset]
        assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))


def test_store_kv_takes_slices_of_qkv(device: torch.device) -> None:
    step = Step([1, 20], [40, 20], 8, 3, 80, device)
    k, v = torch.randn(21, 6 * 80, generator=torch.Generator().manual_seed(3)).bfloat16().to(device).split(240, dim=1)
    k, v = k.unflatten(1, (3, 80)), v.unflatten(1, (3, 80))
    expected = ops.KVCache(step.cache.k.clone(), step.cache.v.clone(), interleaved=False)
    reference.store_kv(k, v, expected, step.meta)
    store_kv(k, v, step.cache, step.meta)
    assert torch.equal(step.cache.k.nan_to_num(7.0), expected.k.nan_to_num(7.0))
    assert torch.equal(step.cache.v.nan_to_num(7.0), expected.v.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_float8_cache_clamps(dtype: torch.dtype, device: torch.device) -> None:
    step = Step([4], [4], 16, 1, 32, device, dtype, torch.float8_e4m3fn)
    # Values that float8 holds, for the interpreter's rounding to it is not a GPU's; and some beyond its range.
    exact = (50 * torch.randn(4, 1, 32, generator=torch.Generator().manual_seed(4))).to(torch.float8_e4m3fn).to(dtype)
    k = exact.clone()
    exact[..., 3], k[..., 3], exact[..., 7], k[..., 7] = 448, 1000, -448, -65000
    store_kv(k.to(device), -k.to(device), step.cache, step.meta)
    stored_k, stored_v = step.cache.gather(step.meta.block_table[0].long())
    assert torch.equal(stored_k[0, :4].cpu().to(dtype), exact[:, 0])
    assert torch.equal(stored_v[0, :4].cpu().to(dtype), -exact[:, 0])


def test_a_cache_in_the_cpus_order_is_refused(device: torch.device) -> None:
    step = Step([1], [5], 16, 1, 32, device)
    cache = ops.KVCache.allocate(2, 16, 1, 32, torch.bfloat16, device, interleaved=True)
    k = torch.zeros(1, 1, 32, dtype=torch.bfloat16, device=device)
    assert store_kv(k, k, cache, step.meta) is NotImplemented
