"""Long chunks: gathering and merging against plain torch, and on a GPU the whole route through cuDNN."""

from __future__ import annotations

import pytest
import torch
from paged import HALF, TOLERANCE, Step, exact_attention, relative_error

from octavo.ops.triton import attention_cudnn, attention_flash, attention_plans
from octavo.ops.triton.attention import paged_attention


@pytest.fixture(autouse=True)
def no_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where FlashAttention 4 is installed it takes what comes here elsewhere."""
    monkeypatch.setattr(attention_flash, "serves", lambda q, meta: False)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 8), (32, 128)])
def test_gather_reads_the_pages_in_order(
    head_dim: int, block_size: int, heads_first: bool, device: torch.device
) -> None:
    step = Step([3, 2], [131, 150], block_size, 2, head_dim, device)
    pieces = [
        attention_cudnn.gather(step.cache, step.meta.block_table, *cut, HALF, heads_first)
        for cut in ((0, 31), (31, 100))
    ]
    assert all(x.transpose(1, 2).is_contiguous() == heads_first for pair in pieces for x in pair)
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
    tensors[3] = tensors[3].t().contiguous().t()  # the rows of the two need not lie alike
    out = torch.full((21, 4 * 80), float("nan"), device=device)
    attention_cudnn.merge(*tensors, out)
    torch.testing.assert_close(out.cpu(), (scores.softmax(-1) @ values).transpose(0, 1).flatten(1))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
def test_long_and_short_chunks_in_one_step(
    block_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, lengths = (
        [1, 30, 1100, 1100, 2000, 2000, 7, 1024, 1024, 1024],
        [500, 90, 1100, 1100, 3333, 3333, 7, 1025, *[1024] * 2],
    )
    step = Step(rows, lengths, block_size, 2, 128, device)
    step.meta.query_lens_host, step.meta.seq_lens_host = rows, lengths
    q = torch.randn(step.num_rows, 8, 128, dtype=torch.bfloat16, device=device)
    low_limits(monkeypatch, 256)
    assert attention_cudnn.serves(q, step.meta)
    out = paged_attention(q, step.cache, step.meta, 0.1, None, None, None)
    assert relative_error(out, exact_attention(q, step, 0.1)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1000, 1024])
def test_a_step_of_equal_prompts_alone(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step([rows] * 4, [rows] * 4, 16, 2, 128, device)
    step.meta.query_lens_host = step.meta.seq_lens_host = [rows] * 4
    q = torch.randn(step.num_rows, 8, 128, dtype=torch.bfloat16, device=device)
    low_limits(monkeypatch, 256)
    out = paged_attention(q, step.cache, step.meta, 0.1, None, None, None)
    assert relative_error(out, exact_attention(q, step, 0.1)) < TOLERANCE


@pytest.mark.gpu
def test_no_plan_is_built_after_those_of_the_start(device: torch.device) -> None:
    sizes = (32, 8, 128, torch.bfloat16, device)
    assert attention_cudnn.build_plans(*sizes, 4096, 16384, 8) == len(attention_plans.plans(32, 4096, 16384, 8))


def low_limits(monkeypatch: pytest.MonkeyPatch, least: int, scores: int = 0) -> None:
    for name, value in (
        ("MIN_ROWS", least),
        ("MIN_EQUAL_ROWS", least),
        ("MIN_TOTAL_ROWS", 2 * least),
        ("MIN_ROWS_AFTER_PAST", least),
        ("MIN_PAST", 1),
        ("MIN_SCORES", scores),
        ("MIN_SCORES_AFTER_PAST", scores),
    ):
        monkeypatch.setattr(attention_plans, name, value)


@pytest.mark.parametrize(
    ("rows", "lengths", "expected"),
    [
        ([1, 3, 9, 9, 9, 12, 2, 9], [20, 30, 40, 40, 50, 12, 2, 9], [(2, 1, 4), (3, 1, 13), (4, 1, 22), (5, 1, 31)]),
        ([12, 12], [12, 12], [(0, 1, 0), (1, 1, 12)]),
        ([16] * 7, [16] * 7, [(0, 4, 0), (4, 2, 64), (6, 1, 96)]),
    ],
)
def test_steps_are_cut_into_pieces_of_one_route(
    rows: list[int], lengths: list[int], expected: list[tuple[int, int, int]], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each row is computed once, by the route that its request's lengths call for."""
    step = Step(rows, lengths, 16, 2, 32, device)
    step.meta.query_lens_host, step.meta.seq_lens_host = rows, lengths
    q = torch.randn(step.num_rows, 4, 32, generator=torch.Generator().manual_seed(0)).to(HALF).to(device)
    exact = exact_attention(q, step, 0.2).to(HALF)
    taken = []

    def attend_prompts(q, cache, meta, first, count, first_row, n, scale):  # type: ignore[no-untyped-def]
        assert n == rows[first] == lengths[first]
        taken.append((first, count, first_row))
        return exact[first_row : first_row + count * n]

    def attend_after_past(q, cache, meta, out, request, first_row, n, context, scale) -> None:  # type: ignore[no-untyped-def]
        assert (n, context) == (rows[request], lengths[request])
        taken.append((request, 1, first_row))
        out[first_row : first_row + n] = exact[first_row : first_row + n]

    monkeypatch.setattr(attention_cudnn, "attend_prompts", attend_prompts)
    monkeypatch.setattr(attention_cudnn, "attend_after_past", attend_after_past)
    monkeypatch.setattr(attention_cudnn, "serves", lambda q, meta: True)
    low_limits(monkeypatch, 9, 280)
    out = paged_attention(q, step.cache, step.meta, 0.2, None, None, None)
    assert taken == expected
    assert relative_error(out, exact) < TOLERANCE
