"""Latent attention and the store of latent rows against their references."""

from __future__ import annotations

import pytest
import torch
from paged import HALF, TOLERANCE, Step, relative_error
from torch import Tensor

from octavo import ops
from octavo.ops import latent as reference
from octavo.ops.triton import latent


def shared_step(rows: list[int], lengths: list[int], rank: int, turned: int, device: torch.device) -> Step:
    """A step over pages whose values are the keys."""
    step = Step(rows, lengths, 16, 1, rank + turned, device)
    step.cache = ops.KVCache(step.cache.k, step.cache.k)
    return step


def in_float32(cache: ops.KVCache) -> ops.KVCache:
    rows = cache.k.float()
    return ops.KVCache(rows, rows)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "rank", "turned"), [(16, 64, 16), (5, 24, 8), (9, 32, 32)])
def test_rows_are_stored_and_queries_turned(
    heads: int, rank: int, turned: int, interleaved: bool, device: torch.device
) -> None:
    step = shared_step([1, 4], [20, 30], rank, turned, device)
    step.meta.slot_mapping[0] = -1  # a row that pads
    generator = torch.Generator().manual_seed(1)
    q, rows = (
        torch.randn(*shape, generator=generator).to(HALF).to(device)
        for shape in ((5, heads, rank + turned), (5, rank + turned))
    )
    angles = torch.arange(max(step.lengths))[:, None] * torch.rand(turned // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    norm = torch.randn(rank, generator=generator).to(HALF).to(device)
    expected = in_float32(step.cache)
    rest = (norm.float(), 1e-6, interleaved)
    turn = q[:, :, rank:]  # a view, as the model has it
    q_expected = reference._store(turn.float(), rows.float(), step.positions, cos_sin, expected, step.meta, *rest)
    found = latent.latent_rotary_and_store(
        turn, rows, step.positions, cos_sin, step.cache, step.meta, norm, 1e-6, interleaved
    )
    assert relative_error(found, q_expected) < TOLERANCE
    assert torch.equal(step.cache.k.isnan(), expected.k.isnan())
    assert relative_error(step.cache.k.nan_to_num(), expected.k.nan_to_num()) < TOLERANCE


@pytest.mark.parametrize(
    ("heads", "rank", "turned", "rows", "lengths"),
    [
        (16, 64, 16, [1, 1, 1], [1, 17, 300]),  # decodes, of which the longest is split
        (20, 32, 8, [1, 3, 6], [40, 70, 6]),  # more heads than a tile, chunks after a past
        (5, 24, 8, [1, 1], [50, 0]),  # odd sizes, a request that pads
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_attention_is_the_reference(
    heads: int, rank: int, turned: int, rows: list[int], lengths: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    step = shared_step(rows, lengths, rank, turned, device)
    q = torch.randn(step.num_rows, heads, rank + turned, generator=torch.Generator().manual_seed(2)).to(dtype)
    q = q.to(device)
    expected: Tensor = reference._attend(q.float(), in_float32(step.cache), step.meta, 0.2, rank)
    found = latent.latent_attention(q, step.cache, step.meta, 0.2, rank)
    assert found.shape == (step.num_rows, heads, rank)
    if 0 in lengths:
        assert not found[lengths.index(0)].any()
        found, expected = found[:-1], expected[:-1]
    assert relative_error(found, expected) < (1e-4 if dtype == torch.float32 else TOLERANCE)


def test_rows_behind_the_last_request_are_zeros(device: torch.device) -> None:
    step = shared_step([2, 2], [20, 9], 32, 8, device)
    step.meta.query_start[-1] = 3  # the last row pads
    step.meta.seq_lens[1] = 8
    q = torch.randn(4, 4, 40).to(HALF).to(device)
    found = latent.latent_attention(q, step.cache, step.meta, 0.2, 32)
    assert not found[3].any()
    assert found[:3].all(dim=2).all()
