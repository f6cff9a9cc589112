"""Long chunks: gathering and merging against plain torch, and on a GPU the whole route through cuDNN."""

from __future__ import annotations

import pytest
import torch
from paged import HALF, TOLERANCE, Step, exact_attention, relative_error

from octavo.ops.triton import attention_cudnn
from octavo.ops.triton.attention import paged_attention


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 8), (32, 128)])
def test_gather_reads_the_pages_in_order(head_dim: int, block_size: int, device: torch.device) -> None:
    step = Step([3, 2], [131, 150], block_size, 2, head_dim, device)
    pieces = [attention_cudnn.gather(step.cache, step.meta.block_table, *cut, HALF) for cut in ((0, 31), (31, 100))]
    for i, ours in enumerate(torch.cat(pair, dim=1) for pair in zip(*pieces, strict=True)):
        for s in range(2):
            theirs = step.cache.gather(step.meta.block_table[s].long())[i][:, :131]
            assert torch.equal(ours[s], theirs.transpose(0, 1))


def test_merge_is_one_softmax_over_both(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(4, 21, 50, generator=generator)
    values = torch.randn(4, 50, 80, generator=generator)
    parts = [
        (s.softmax(-1) @ v, s.logsumexp(-1)) for s, v in zip(scores.split(30, 2), values.split(30, 1), strict=True)
    ]
    tensors = [x.to(device) for part in parts for x in part]
    out = torch.full((21, 4 * 80), float("nan"), device=device)
    attention_cudnn.merge(*tensors, out)
    torch.testing.assert_close(out.cpu(), (scores.softmax(-1) @ values).transpose(0, 1).flatten(1))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
def test_long_and_short_chunks_in_one_step(
    block_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, lengths = [1, 30, 1100, 1100, 2000, 2000, 7, 1024], [500, 90, 1100, 1100, 3333, 3333, 7, 1025]
    step = Step(rows, lengths, block_size, 2, 128, device)
    step.meta.query_lens_host, step.meta.seq_lens_host = rows, lengths
    q = torch.randn(step.num_rows, 8, 128, dtype=torch.bfloat16, device=device)
    monkeypatch.setattr(attention_cudnn, "MIN_SCORES", 0)
    monkeypatch.setattr(attention_cudnn, "MIN_SCORES_WITH_PAST", 0)
    assert attention_cudnn.serves(q, step.meta)
    out = paged_attention(q, step.cache, step.meta, 0.1, None, None, None)
    assert relative_error(out, exact_attention(q, step, 0.1)) < TOLERANCE


def test_steps_are_cut_into_runs_of_one_route(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is computed once, by the route that its request's lengths call for."""
    rows, lengths = [1, 3, 9, 9, 9, 12, 2, 9], [20, 30, 40, 40, 50, 12, 2, 9]
    step = Step(rows, lengths, 16, 2, 32, device)
    step.meta.query_lens_host, step.meta.seq_lens_host = rows, lengths
    taken = []

    def attend(q, cache, meta, out, first, count, first_row, scale) -> None:  # type: ignore[no-untyped-def]
        taken.append((first, count, first_row))
        out[first_row : first_row + count * rows[first]] = expected[first_row : first_row + count * rows[first]]

    q = torch.randn(step.num_rows, 4, 32, generator=torch.Generator().manual_seed(0)).to(HALF).to(device)
    expected = exact_attention(q, step, 0.2).to(HALF)
    monkeypatch.setattr(attention_cudnn, "attend_requests", attend)
    monkeypatch.setattr(attention_cudnn, "serves", lambda q, meta: True)
    monkeypatch.setattr(attention_cudnn, "MIN_ROWS", 9)
    monkeypatch.setattr(attention_cudnn, "MIN_SCORES", 1000)
    monkeypatch.setattr(attention_cudnn, "MIN_SCORES_WITH_PAST", 1000)
    out = paged_attention(q, step.cache, step.meta, 0.2, None, None, None)
    assert taken == [(2, 2, 4), (4, 1, 22)]
    assert relative_error(out, expected) < TOLERANCE
