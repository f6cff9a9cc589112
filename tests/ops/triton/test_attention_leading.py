"""Decode attention beside prompts whose number only the device knows, as in the graphs of steps with prompts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged import TOLERANCE, Step, exact_attention, relative_error
from test_attention import SMALL, poisoned, queries

from octavo.ops import AttentionMetadata
from octavo.ops.triton import attention, attention_decode, attention_leading, attention_prefill
from octavo.ops.triton.attention import paged_attention
from octavo.ops.triton.attention_decode import decode, splits_for
from octavo.ops.triton.attention_leading import decode_leading, programs_for
from octavo.ops.triton.attention_prefill import prefill


def on_device(meta: AttentionMetadata) -> AttentionMetadata:
    """The metadata of a graph's step: the numbers of decodes and of requests are on the device alone."""
    present = int((meta.seq_lens > 0).sum())
    counts = torch.tensor([meta.num_decodes, present], dtype=torch.int32, device=meta.seq_lens.device)
    return replace(meta, num_decodes=0, counts=counts, max_prompts=present - meta.num_decodes)


def mixed(
    decodes: list[int], prompts: list[tuple[int, int]], absent: int, padding: int, *sizes: int, **more: Any
) -> Step:
    """Contexts of decodes, (new tokens, context) of prompts, requests that are not there, and padded tokens."""
    rows = [1] * len(decodes) + [n for n, _ in prompts] + [0] * absent + [padding]
    lengths = decodes + [length for _, length in prompts] + [0] * (absent + 1)
    return Step(rows, lengths, *sizes, **more)


@pytest.mark.parametrize("num_decodes", [0, 1, 2, 5, 6, 7, 9])
@pytest.mark.parametrize("window", [None, 20])
def test_a_decode_has_the_bits_of_the_decode_kernel(num_decodes: int, window: int | None, device: torch.device) -> None:
    """Pairs of a request and a key head: fewer than a wave of programs, just over one, and more."""
    lengths = [1 + 37 * i % 90 for i in range(num_decodes)]
    step = mixed(lengths, [(9, 30)], 12 - num_decodes, 3, 8, 2, 16, device=device, window=window)
    q = queries(step, 4)
    expected, out = poisoned(q), poisoned(q)
    if num_decodes:
        decode(q, step.cache, step.meta, expected, num_decodes, 0.3, window, block_n=16)
    for _ in range(2):  # the second finds the counters as the first left them
        decode_leading(q, step.cache, on_device(step.meta), out, 13, 0.3, window, block_n=16)
        assert torch.equal(out[:num_decodes], expected[:num_decodes])
        assert out[num_decodes:].isnan().all()  # rows of prompts are left to their kernel


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_there_are_programs_for_any_number_of_decodes(kv_heads: int, device: torch.device) -> None:
    most = programs_for(40, kv_heads, 3, device)
    needed = [n * kv_heads * splits_for(n * kv_heads, 3, device) for n in range(1, 41)]
    assert most == max(needed) and programs_for(0, kv_heads, 3, device) == 1


@pytest.mark.parametrize("num_decodes", [0, 3])
def test_the_prompts_kernel_skips_them_and_changes_no_other_row(num_decodes: int, device: torch.device) -> None:
    step = mixed([33] * num_decodes, [(9, 30), (1, 17), (40, 40)], 2, 5, 16, 1, 32, device=device)
    q = queries(step, 4)
    alone, out = poisoned(q), poisoned(q)
    meta = step.meta
    num_requests = len(step.rows)
    prefill(q, step.cache, meta, alone, num_decodes, num_requests - num_decodes, step.num_rows, 0.3, tiles=SMALL)
    prefill(q, step.cache, on_device(meta), out, 0, num_requests, step.num_rows, 0.3, tiles=SMALL)
    assert torch.equal(out[num_decodes:], alone[num_decodes:])
    assert out[:num_decodes].isnan().all() and not out[-5:].any()


def random_step(seed: int, device: torch.device) -> None:
    choose = random.Random(seed)
    head_dim, block_size = choose.choice((16, 32, 80, 128)), choose.choice((8, 16, 48))
    kv_heads, group = choose.choice((1, 2)), choose.randint(1, 8)
    longest = 70 if device.type == "cpu" else 1500
    decodes = [choose.randint(1, longest) for _ in range(choose.choice((0, 1, 4, 7)))]
    rows = [choose.randint(1, longest) for _ in range(choose.choice((1, 2)))]
    prompts = [(n, n + choose.choice((0, 0, 7, longest))) for n in rows]
    absent, padding = choose.choice((0, 1, 9)), choose.choice((0, 1, 30))
    window, softcap = choose.choice((None, None, 5, 37)), choose.choice((None, 2.0))
    step = mixed(
        decodes, prompts, absent, padding, block_size, kv_heads, head_dim, device=device, seed=seed, window=window
    )
    heads = kv_heads * group
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if choose.random() < 0.3 else None
    sinks = None if sinks is None else sinks.to(device)
    q = queries(step, heads)
    out = paged_attention(q, step.cache, on_device(step.meta), head_dim**-0.5, window, softcap, sinks)
    real = step.num_rows - padding
    expected = exact_attention(q, step, head_dim**-0.5, window, softcap, sinks)[:real]
    assert relative_error(out[:real], expected) < TOLERANCE
    assert not out[real:].any()


@pytest.mark.parametrize("seed", range(8))
def test_random_mixes_of_decodes_and_prompts(seed: int, device: torch.device) -> None:
    random_step(seed, device)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 60))
def test_many_random_mixes(seed: int, device: torch.device) -> None:
    random_step(seed, device)


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, name: str, launches: Counter[str]) -> None:
        self._kernel, self._name, self._launches = kernel, name, launches

    def __getitem__(self, grid: Any) -> Any:
        self._launches[self._name] += 1
        return self._kernel[grid]


def test_it_is_one_launch_more(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Counter[str]()
    for module, name in ((attention_decode, "decode_kernel"), (attention_leading, "leading_kernel")):
        monkeypatch.setattr(module, name, Counted(getattr(module, name), name, launches))
    kernel = attention_prefill.prefill_kernel
    monkeypatch.setattr(attention_prefill, "prefill_kernel", Counted(kernel, "prefill_kernel", launches))
    step = mixed([5, 9, 30], [(9, 30)], 1, 3, 8, 2, 16, device=device)
    attention.paged_attention(queries(step, 4), step.cache, on_device(step.meta), 0.3, None, None, None)
    assert launches == {"leading_kernel": 1, "prefill_kernel": 1}


@pytest.mark.gpu
def test_a_graph_replays_for_other_numbers_of_decodes(device: torch.device) -> None:
    steps = [
        mixed([700, 1, 90], [(20, 300), (1, 30)], 3, 5, 16, 2, 128, device=device),
        mixed([400], [(1, 30), (22, 22)], 5, 5, 16, 2, 128, device=device),
        mixed([], [(24, 500)], 7, 5, 16, 2, 128, device=device),
    ]
    fixed, q = on_device(steps[0].meta), queries(steps[0], 8)
    table = torch.zeros(9, 64, dtype=torch.int32, device=device)
    fixed = replace(fixed, block_table=table)
    cache = steps[0].cache
    paged_attention(q, cache, fixed, 0.1, None, None, None)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(q, cache, fixed, 0.1, None, None, None)
    for step in steps:
        meta = on_device(step.meta)
        assert fixed.counts is not None and meta.counts is not None
        for kept, new in zip(
            (fixed.query_start, fixed.seq_lens, fixed.counts), (meta.query_start, meta.seq_lens, meta.counts),
            strict=True,
        ):  # fmt: skip
            kept.copy_(new)
        table.zero_()[:, : step.meta.block_table.shape[1]] = step.meta.block_table
        for kept, new in zip((cache.k, cache.v), (step.cache.k, step.cache.v), strict=True):
            kept[: len(new)] = new[: len(kept)]
        out.fill_(float("nan"))
        graph.replay()
        real = step.num_rows - 5
        assert relative_error(out[:real], exact_attention(q, step, 0.1)[:real]) < TOLERANCE
        assert not out[real:].any()
