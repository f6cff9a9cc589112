"""Chunks through FlashAttention 4: the gathering of keys against plain torch, and on a GPU the whole route."""

from __future__ import annotations

import itertools

import pytest
import torch
from paged import HALF, TOLERANCE, Step, exact_attention, relative_error

from octavo.ops.triton import attention_flash
from octavo.ops.triton.attention import paged_attention


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 8)])
def test_keys_of_a_request_are_in_order_and_fill_whole_tiles(
    head_dim: int, block_size: int, device: torch.device
) -> None:
    lengths = [131, 128, 7]
    step = Step([3, 2, 1], lengths, block_size, 2, head_dim, device)  # what is not written in a page is NaN
    meta = step.meta
    starts = attention_flash.key_rows(meta.seq_lens)
    assert starts.tolist() == [0, 256, 384, 512] and starts.dtype == torch.int32
    gathered = attention_flash.gather(step.cache, meta.block_table, meta.seq_lens, starts, lengths, HALF)
    for s, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        for ours, theirs in zip(gathered, step.cache.gather(meta.block_table[s].long()), strict=True):
            assert torch.equal(ours[first : first + lengths[s]], theirs[:, : lengths[s]].transpose(0, 1))
            assert not ours[first + lengths[s] : last].any()


def test_without_the_package_or_a_gpu_that_it_knows_nothing_comes_here() -> None:
    if attention_flash.load() is None:
        assert not attention_flash.fits(torch.bfloat16, 128)
    assert not attention_flash.fits(torch.float32, 128) and not attention_flash.fits(torch.bfloat16, 256)


@pytest.mark.parametrize(
    ("lengths", "contexts", "pays"),
    [
        ([2048], [2048], True),
        ([512] * 32, [2048] * 32, True),
        ([64], [70_000], True),
        ([512] * 4, [512] * 4, False),  # small
        ([64] * 300, [300] * 300, False),  # many
        ([512] * 5, [30_000] * 5, False),  # more than there is room for
        ([], [], False),
    ],
)
def test_which_chunks_are_worth_it(lengths: list[int], contexts: list[int], pays: bool) -> None:
    assert attention_flash.pays(lengths, contexts) == pays


@pytest.mark.gpu
@pytest.mark.parametrize(("block_size", "head_dim", "heads"), [(16, 128, 8), (32, 64, 14), (16, 80, 2)])
def test_chunks_of_any_lengths_beside_decodes(
    block_size: int, head_dim: int, heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention_flash.load() is None:
        pytest.skip("needs flash-attn-4 and a Hopper GPU")
    rows, lengths = [1, 1, 30, 1100, 7, 300, 129], [500, 20, 90, 1100, 7, 3000, 257]
    step = Step(rows, lengths, block_size, 2, head_dim, device)
    step.meta.query_lens_host, step.meta.seq_lens_host = rows, lengths
    q = torch.randn(step.num_rows, heads, head_dim, dtype=torch.bfloat16, device=device)
    assert not attention_flash.serves(q, step.meta)  # too small to pay
    monkeypatch.setattr(attention_flash, "MIN_SCORES", 1)
    assert attention_flash.serves(q, step.meta)
    for _ in range(2):  # the second time as in a model's second layer
        out = paged_attention(q, step.cache, step.meta, 0.1, None, None, None)
        assert relative_error(out, exact_attention(q, step, 0.1)) < TOLERANCE


@pytest.mark.gpu
def test_a_request_with_infinite_values_leaves_others_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention_flash.load() is None:
        pytest.skip("needs flash-attn-4 and a Hopper GPU")
    rows, lengths = [40, 50, 60], [140, 150, 160]
    step = Step(rows, lengths, 16, 2, 128, device)
    step.meta.query_lens_host, step.meta.seq_lens_host = rows, lengths
    q = torch.randn(step.num_rows, 4, 128, dtype=torch.bfloat16, device=device)
    monkeypatch.setattr(attention_flash, "MIN_SCORES", 1)
    expected = paged_attention(q, step.cache, step.meta, 0.1, None, None, None)
    step.cache.v[step.meta.block_table[1, :10].long()] = float("inf")
    out = paged_attention(q, step.cache, step.meta, 0.1, None, None, None)
    assert torch.equal(out[:40], expected[:40]) and torch.equal(out[90:], expected[90:])
    assert not out[40:90].isfinite().any()
