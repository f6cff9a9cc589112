"""Rotation, store and decode attention in one launch against the two operations that it stands for."""

from __future__ import annotations

import random

import pytest
import torch
from paged import HALF, TOLERANCE, Step, relative_error
from torch import Tensor

from octavo import ops
from octavo.ops import reference
from octavo.ops.triton.attention_fused import MAX_REQUESTS, rotary_and_attend
from octavo.ops.triton.scaled import Scaled


def inputs(step: Step, heads: int, rotary: int, has_norms: bool, seed: int = 2) -> tuple[Tensor, Tensor, tuple]:
    device, d, generator = step.positions.device, step.cache.head_dim, torch.Generator().manual_seed(seed)
    qkv = torch.randn(step.num_rows, (heads + 2 * step.cache.num_kv_heads) * d, generator=generator).to(HALF)
    angles = torch.arange(max(step.lengths) + 1)[:, None] * torch.rand(rotary // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    norms = tuple(torch.randn(d, generator=generator).to(HALF).to(device) if has_norms else None for _ in range(2))
    return qkv.to(device), cos_sin.to(device), norms


def compare(
    step: Step, heads: int, rotary: int, has_norms: bool, interleaved: bool, window: int | None = None,
    softcap: float | None = None, num_splits: int | None = None, seed: int = 2, is_scaled: bool = False,
) -> None:  # fmt: skip
    cache, d = step.cache, step.cache.head_dim
    qkv, cos_sin, norms = inputs(step, heads, rotary, has_norms, seed)
    exact_qkv, given = qkv.float(), qkv
    if is_scaled:
        given = Scaled(qkv, *(0.5 + torch.rand(n, device=qkv.device) for n in ((len(qkv), 1), qkv.shape[1:])))
        exact_qkv = exact_qkv * given.row * given.column
    shape = (heads, cache.num_kv_heads, d)
    newest = step.meta.slot_mapping[step.meta.slot_mapping >= 0]
    for x in (cache.k, cache.v):  # nothing reads the newest slot before it is written
        x[newest // cache.block_size, :, newest % cache.block_size] = float("nan")
    plain = ops.KVCache(cache.k.float(), cache.v.float(), interleaved=False)
    wide = [None if x is None else x.float() for x in norms]
    exact = reference.rotary_and_store(
        exact_qkv, step.positions, cos_sin, plain, step.meta, *shape, *wide, 1e-5, interleaved
    )
    live = step.meta.seq_lens > 0
    expected = reference.paged_attention(exact, plain, step.meta, d**-0.5, window, softcap, None)
    out = rotary_and_attend(
        given, step.positions, cos_sin, cache, step.meta, *shape, d**-0.5, window, softcap, *norms, 1e-5, interleaved,
        num_splits=num_splits,
    )  # fmt: skip
    assert relative_error(out[live], expected[live]) < TOLERANCE
    assert not out[~live].any()
    for ours, theirs in ((cache.k, plain.k), (cache.v, plain.v)):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert relative_error(ours.nan_to_num(), theirs.nan_to_num()) < TOLERANCE


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "heads", "head_dim", "rotary", "norms"),
    [(2, 8, 128, 128, False), (1, 2, 128, 128, True), (3, 9, 64, 64, False), (1, 2, 80, 32, True)],
)
def test_one_launch_is_the_two_operations(
    kv_heads: int, heads: int, head_dim: int, rotary: int, norms: bool, interleaved: bool, device: torch.device
) -> None:
    step = Step([1] * 4, [1, 65, 200, 0], 16, kv_heads, head_dim, device)
    compare(step, heads, rotary, norms, interleaved)


@pytest.mark.parametrize("norms", [False, True])
def test_scales_that_a_product_left_are_applied(norms: bool, device: torch.device) -> None:
    step = Step([1] * 4, [1, 65, 200, 0], 16, 2, 64, device)
    compare(step, 6, 48, norms, False, is_scaled=True)


@pytest.mark.parametrize("num_splits", [1, 2, 30])
def test_any_number_of_parts(num_splits: int, device: torch.device) -> None:
    compare(Step([1] * 3, [300, 129, 2], 16, 1, 64, device), 2, 64, False, False, num_splits=num_splits)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed: int, device: torch.device) -> None:
    choose = random.Random(seed)
    head_dim, block_size = choose.choice((32, 64, 96, 128)), choose.choice((8, 16, 48, 64))
    kv_heads, group = choose.choice((1, 2)), choose.randint(1, 8)
    lengths = [choose.randint(0, 3000 if device.type == "cuda" else 300) for _ in range(choose.randint(1, 3))] + [1]
    window = choose.choice((None, 1, 5, 37))
    step = Step([1] * len(lengths), lengths, block_size, kv_heads, head_dim, device, seed=seed, window=window)
    softcap, norms, interleaved = choose.choice((None, 2.0)), choose.random() < 0.5, choose.random() < 0.5
    compare(step, kv_heads * group, head_dim, norms, interleaved, window, softcap, choose.choice((None, 4)), seed)


def test_steps_that_it_leaves_to_the_two_operations(device: torch.device) -> None:
    many = MAX_REQUESTS + 1
    for step in (Step([1, 2], [4, 5], 16, 1, 32, device), Step([1] * many, [2] * many, 16, 1, 32, device)):
        qkv, cos_sin, norms = inputs(step, 2, 32, False)
        out = rotary_and_attend(
            qkv, step.positions, cos_sin, step.cache, step.meta, 2, 1, 32, 0.2, None, None, *norms, 1e-5
        )
        assert out is NotImplemented


@pytest.mark.gpu
def test_it_replays_in_a_graph_for_other_lengths(device: torch.device) -> None:
    step = Step([1] * 4, [700, 1, 90, 0], 16, 2, 128, device)
    qkv, cos_sin, norms = inputs(step, 8, 128, True)
    args = (qkv, step.positions, cos_sin, step.cache, step.meta, 8, 2, 128, 0.1, None, None, *norms, 1e-5)
    eager = rotary_and_attend(*args).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rotary_and_attend(*args)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)
    step.meta.seq_lens.copy_(torch.tensor([650, 1, 33, 0]))
    step.positions.copy_(step.meta.seq_lens - 1)
    graph.replay()
    changed = out.clone()
    assert torch.equal(changed, rotary_and_attend(*args))
    assert not torch.equal(changed, eager)
