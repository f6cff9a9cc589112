"""Decode attention that reads what requests share once, against the reference."""

from __future__ import annotations

import pytest
import torch
from paged import TOLERANCE, Step, exact_attention, relative_error
from test_attention import poisoned, queries

from octavo.ops.triton.attention import paged_attention
from octavo.ops.triton.attention_shared import decode_shared


def sharing(step: Step, num_shared: int, block_size: int) -> Step:
    """The same step with its first blocks those of its first request, in the table of every other."""
    step.meta.block_table[1:, : num_shared // block_size] = step.meta.block_table[0, : num_shared // block_size]
    step.meta.num_shared = torch.tensor([num_shared], dtype=torch.int32, device=step.cache.k.device)
    return step


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size", "num_shared", "softcap"),
    [(2, 4, 64, 16, 160, None), (1, 3, 80, 32, 32, None), (2, 1, 32, 16, 16, 2.0), (1, 8, 128, 16, 0, None)],
)
@pytest.mark.parametrize("num_splits", [1, 3, 8])
def test_decode_shared_is_the_reference(
    kv_heads: int, group: int, head_dim: int, block_size: int, num_shared: int, softcap: float | None,
    num_splits: int, device: torch.device,
) -> None:  # fmt: skip
    lengths = [num_shared + own for own in (1, 64, 7, 130, 33)]
    step = sharing(Step([1] * 5, lengths, block_size, kv_heads, head_dim, device), num_shared, block_size)
    q = queries(step, kv_heads * group)
    out = poisoned(q)
    decode_shared(q, step.cache, step.meta, out, 0.2, softcap, num_splits=num_splits, block_n=32)
    assert relative_error(out, exact_attention(q, step, 0.2, softcap=softcap)) < TOLERANCE


def test_padding_is_zeros_and_many_tiles_of_queries(device: torch.device) -> None:
    lengths = [48 + i % 5 + 1 for i in range(33)] + [0, 0]
    step = sharing(Step([1] * 35, lengths, 16, 1, 16, device), 48, 16)
    q = queries(step, 4)  # 140 queries: three tiles
    out = poisoned(q)
    decode_shared(q, step.cache, step.meta, out, 0.2)
    assert relative_error(out[:33], exact_attention(q, step, 0.2)[:33]) < TOLERANCE
    assert not out[33:].any()


def test_the_shared_keys_are_read_from_the_first_request(device: torch.device) -> None:
    """So they are read once: what another request's table says of them does not count."""
    step = sharing(Step([1] * 3, [70, 80, 65], 16, 1, 16, device), 64, 16)
    q = queries(step, 2)
    expected = exact_attention(q, step, 0.2)
    step.meta.block_table[1:, :4] = 0
    assert relative_error(paged_attention(q, step.cache, step.meta, 0.2, None, None, None), expected) < TOLERANCE
