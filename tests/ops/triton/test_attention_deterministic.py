"""Attention of which a row has the same bits in any step: against itself in other steps, and against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exact import exact_products  # noqa: F401
from paged import TOLERANCE, Step, exact_attention, relative_error
from torch import Tensor

from octavo.ops.triton.attention_deterministic import Cut, cut_for, paged_attention

pytestmark = pytest.mark.usefixtures("exact_products")
SMALL = Cut(32, 16, 64, 4, 2)  # small tiles and parts, so that short contexts have several of both


def queries(step: Step, heads: int, lengths: list[int]) -> Tensor:
    """Queries that a request's position decides, so that steps over parts of a prompt ask what the whole one asks."""
    rows = []
    for s, (count, length) in enumerate(zip(step.rows, lengths, strict=True)):
        generator = torch.Generator().manual_seed(s)
        rows.append(torch.randn(max(lengths), heads, step.cache.head_dim, generator=generator)[length - count : length])
    return torch.cat(rows).to(step.cache.dtype).to(step.cache.k.device)


def step_of(whole: Step, rows: list[int], lengths: list[int], members: list[int]) -> Step:
    """A step over the pages of `whole` with other rows, decodes first."""
    step = Step(
        rows, lengths, whole.cache.block_size, whole.cache.num_kv_heads, whole.cache.head_dim, whole.cache.k.device
    )
    step.cache = whole.cache
    step.meta = replace(step.meta, block_table=whole.meta.block_table[members].contiguous())
    return step


@pytest.mark.parametrize("extras", ["plain", pytest.param("window", marks=pytest.mark.slow), "sinks"])
@pytest.mark.parametrize("part", [64, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [(1, 64, 149), pytest.param((3, 10), marks=pytest.mark.slow)], ids=str)
def test_every_row_has_the_bits_of_the_whole_prompt(
    extras: str, part: int, sizes: tuple[int, ...], device: torch.device
) -> None:
    heads, length = 6, 150
    window = 70 if extras == "window" else None
    sinks = torch.linspace(-1, 1, heads, device=device) if extras == "sinks" else None
    arguments = (0.2, window, 20.0 if extras == "sinks" else None, sinks, SMALL._replace(part_keys=part))
    whole = Step([length], [length], 16, 2, 32, device)
    q = queries(whole, heads, [length])
    whole.cache.deterministic = True
    expected = paged_attention(q, whole.cache, whole.meta, *arguments)
    exact = exact_attention(q, whole, *arguments[:-1])
    assert relative_error(expected, exact) < TOLERANCE
    for size in sizes:  # chunks of the prompt; 1 is a decode each
        for start in range(0, length, size):
            end = min(start + size, length)
            if size == 1 and start % 13 and start not in (63, 64, 127, 128):
                continue
            chunk = step_of(whole, [end - start], [end], [0])
            out = paged_attention(q[start:end], whole.cache, chunk.meta, *arguments)
            assert torch.equal(out, expected[start:end]), (size, start)


def test_a_request_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    lengths = [130, 17, 64, 90]
    rows = [1, 1, 20, 90]
    batch = Step(rows, lengths, 16, 1, 32, device)
    q = queries(batch, 4, lengths)
    arguments = (0.2, None, None, None, SMALL)
    together = paged_attention(q, batch.cache, batch.meta, *arguments)
    assert relative_error(together, exact_attention(q, batch, 0.2)) < TOLERANCE
    row = 0
    for s, count in enumerate(rows):
        alone = step_of(batch, [count], [lengths[s]], [s])
        out = paged_attention(q[row : row + count], batch.cache, alone.meta, *arguments)
        assert torch.equal(out, together[row : row + count]), s
        row += count


@pytest.mark.parametrize("part", [64, 4096])
def test_padding_is_zeros_and_changes_nothing(part: int, device: torch.device) -> None:
    step = Step([1, 1, 1], [100, 30, 0], 16, 2, 32, device)
    q = queries(step, 4, [100, 30, 1])
    arguments = (0.2, None, None, None, SMALL._replace(part_keys=part))
    out = paged_attention(q, step.cache, step.meta, *arguments)
    assert not out[2].any()
    first = step_of(step, [1], [100], [0])
    assert torch.equal(paged_attention(q[:1], step.cache, first.meta, *arguments), out[:1])


@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (4, 128), (2, 256), (40, 64), (5, 80)])
def test_the_product_cut_serves_any_head(group: int, head_dim: int, device: torch.device) -> None:
    step = Step([1, 40], [70, 90], 16, 2, head_dim, device)
    q = queries(step, 2 * group, [70, 90])
    out = paged_attention(q, step.cache, step.meta, head_dim**-0.5, None, None, None)
    assert relative_error(out, exact_attention(q, step, head_dim**-0.5)) < TOLERANCE
    assert cut_for(head_dim, group, torch.bfloat16).block_m >= group
