"""Paged attention kernels against the reference: decode, prefill and the entry that picks among them."""

from __future__ import annotations

import random

import pytest
import torch
from paged import HALF, TOLERANCE, Step, exact_attention, relative_error
from torch import Tensor

from octavo.ops.triton.attention import paged_attention
from octavo.ops.triton.attention_decode import decode
from octavo.ops.triton.attention_prefill import Tiles, prefill

SMALL = Tiles(32, 16, 4, 2)  # small tiles, so that short contexts have full, masked and several tiles


def queries(step: Step, heads: int, dtype: torch.dtype = HALF, seed: int = 9) -> Tensor:
    q = torch.randn(step.num_rows, heads, step.cache.head_dim, generator=torch.Generator().manual_seed(seed))
    return q.to(dtype).to(step.cache.k.device)


def poisoned(q: Tensor) -> Tensor:
    return torch.full((q.shape[0], q.shape[1] * q.shape[2]), float("nan"), dtype=q.dtype, device=q.device)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [(2, 4, 128, 16), (1, 2, 64, 8), (3, 3, 80, 32), (1, 1, 96, 64), (1, 17, 256, 128), (2, 7, 16, 48)],
)
def test_decode_is_the_reference(
    kv_heads: int, group: int, head_dim: int, block_size: int, device: torch.device
) -> None:
    step = Step([1] * 4, [1, 64, 200, 0], block_size, kv_heads, head_dim, device)
    q = queries(step, kv_heads * group)
    out = poisoned(q)
    decode(q, step.cache, step.meta, out, 4, head_dim**-0.5, num_splits=3)
    assert relative_error(out[:3], exact_attention(q, step, head_dim**-0.5)[:3]) < TOLERANCE
    assert not out[3].any()


@pytest.mark.parametrize("num_splits", [1, 2, 30])
@pytest.mark.parametrize("part_keys", [None, 32])
def test_decode_merges_any_number_of_parts(num_splits: int, part_keys: int | None, device: torch.device) -> None:
    step = Step([1] * 3, [300, 17, 129], 16, 1, 32, device, torch.float32)
    q = queries(step, 2, torch.float32)
    out = poisoned(q)
    for _ in range(2):  # the second finds the counters as the first left them
        out.fill_(float("nan"))
        decode(q, step.cache, step.meta, out, 3, 0.2, num_splits=num_splits, part_keys=part_keys, block_n=16)
        assert relative_error(out, exact_attention(q, step, 0.2)) < 1e-4


def test_with_parts_cut_by_position_a_request_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    step = Step([1] * 3, [300, 17, 150], 16, 2, 32, device)
    q = queries(step, 4)
    outs = [poisoned(q) for _ in range(3)]
    for out, splits in zip(outs, (1, 3, 16), strict=True):  # as batches of other sizes would choose
        decode(q, step.cache, step.meta, out, 3, 0.2, num_splits=splits, part_keys=64, block_n=16)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"),
    [(None, None, True), (None, 2.0, False), (5, None, False), (70, None, True), (70, 2.0, False), (5, 2.0, True)],
)
def test_window_softcap_and_sinks(
    window: int | None, softcap: float | None, has_sinks: bool, device: torch.device
) -> None:
    step = Step([1, 1, 37, 12], [130, 3, 100, 12], 8, 2, 32, device, window=window)
    q = queries(step, 6)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1)).to(device) if has_sinks else None
    expected = exact_attention(q, step, 0.3, window, softcap, sinks)
    out = poisoned(q)
    decode(q, step.cache, step.meta, out, 2, 0.3, window, softcap, sinks, num_splits=3, block_n=16)
    prefill(q, step.cache, step.meta, out, 2, 2, 49, 0.3, window, softcap, sinks, SMALL)
    assert relative_error(out, expected) < TOLERANCE
    out = poisoned(q)
    prefill(q, step.cache, step.meta, out, 0, 4, step.num_rows, 0.3, window, softcap, sinks, SMALL)
    assert relative_error(out, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [(1, 4, 128, 16), (2, 2, 64, 8), (1, 3, 80, 32), (1, 1, 96, 64), (1, 20, 16, 48)],
)
def test_prefill_is_the_reference(
    kv_heads: int, group: int, head_dim: int, block_size: int, device: torch.device
) -> None:
    step = Step([1, 40, 1, 9, 33], [70, 40, 1, 64, 100], block_size, kv_heads, head_dim, device)
    q = queries(step, kv_heads * group)
    out = poisoned(q)
    prefill(q, step.cache, step.meta, out, 0, 5, step.num_rows, head_dim**-0.5, tiles=SMALL)
    assert relative_error(out, exact_attention(q, step, head_dim**-0.5)) < TOLERANCE


@pytest.mark.parametrize("window", [None, 12])
def test_padding_changes_no_prompt_and_is_zeros(window: int | None, device: torch.device) -> None:
    step = Step([1, 9, 33, 0, 0, 37], [70, 33, 33, 0, 0, 0], 16, 1, 16, device, window=window)
    q = queries(step, 4)
    alone, padded = poisoned(q), poisoned(q)
    prefill(q, step.cache, step.meta, alone, 0, 3, 43, 0.3, window, tiles=SMALL)
    prefill(q, step.cache, step.meta, padded, 0, 6, 80, 0.3, window, tiles=SMALL)
    assert torch.equal(padded[:43], alone[:43])
    assert (padded[43:] == 0).all()


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF])
def test_types_of_queries_and_cache(dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device) -> None:
    step = Step([1, 1, 20], [40, 7, 50], 16, 1, 32, device, dtype, cache_dtype)
    q = queries(step, 2, dtype)
    out = paged_attention(q, step.cache, step.meta, 0.2, None, None, None)
    assert out.dtype == dtype
    assert relative_error(out, exact_attention(q, step, 0.2)) < (1e-3 if dtype == torch.float32 else TOLERANCE)


def random_case(seed: int, device: torch.device) -> None:
    choose = random.Random(seed)
    head_dim, block_size = choose.choice((32, 64, 80, 128)), choose.choice((8, 16, 32, 48, 64))
    kv_heads, group = choose.choice((1, 2)), choose.randint(1, 8)
    longest = 90 if device.type == "cpu" else 1500
    decodes, prefills = choose.choice((0, 1, 3)), choose.choice((0, 1, 2))
    rows = [1] * decodes + [choose.randint(2, longest) for _ in range(prefills)] or [5]
    lengths = [r + choose.choice((0, 0, 7, 50, longest)) for r in rows]
    window, softcap = choose.choice((None, None, 5, 37)), choose.choice((None, 2.0))
    heads = kv_heads * group
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if choose.random() < 0.3 else None
    sinks = None if sinks is None else sinks.to(device)
    step = Step(rows, lengths, block_size, kv_heads, head_dim, device, seed=seed, window=window)
    q = queries(step, heads)
    out = paged_attention(q, step.cache, step.meta, head_dim**-0.5, window, softcap, sinks)
    expected = exact_attention(q, step, head_dim**-0.5, window, softcap, sinks)
    assert relative_error(out, expected) < TOLERANCE


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed: int, device: torch.device) -> None:
    random_case(seed, device)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 60))
def test_many_random_steps(seed: int, device: torch.device) -> None:
    random_case(seed, device)


def test_a_nan_stays_in_its_request(device: torch.device) -> None:
    step = Step([1, 9], [33, 41], 16, 1, 32, device)
    step.cache.k[int(step.meta.block_table[0, 0]), :, 3] = float("nan")
    out = paged_attention(queries(step, 2), step.cache, step.meta, 0.2, None, None, None)
    assert out[0].isnan().all()
    assert not out[1:].isnan().any()


@pytest.mark.gpu
def test_decode_replays_in_a_graph_for_other_lengths(device: torch.device) -> None:
    step = Step([1] * 4, [700, 1, 90, 0], 16, 2, 128, device)
    q = queries(step, 8)
    paged_attention(q, step.cache, step.meta, 0.1, None, None, None)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(q, step.cache, step.meta, 0.1, None, None, None)
    for lengths in ([700, 1, 90, 0], [650, 1, 33, 0], [5, 1, 64, 0]):
        step.meta.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out[:3], exact_attention(q, step, 0.1)[:3]) < TOLERANCE
        assert not out[3].any()
