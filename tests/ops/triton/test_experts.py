"""The grouped product of experts against the loop over them, and its sorting."""

from __future__ import annotations

import pytest
import torch

from octavo import ops
from octavo.layers.quantize import quantize_weight
from octavo.ops.experts import ExpertLoop
from octavo.ops.triton.experts import sort_rows
from octavo.ops.triton.weights_experts import TritonExperts, rejects

HIDDEN, INNER, EXPERTS, TOP = 96, 80, 5, 2


def random_experts(quantization: str | None, dtype: torch.dtype, device: torch.device) -> list[ops.Expert]:
    generator = torch.Generator().manual_seed(1)

    def weight(rows: int, columns: int) -> object:
        value = (torch.randn(rows, columns, generator=generator) / 8).to(device)
        return value.to(dtype) if quantization is None else quantize_weight(value, quantization)

    return [([weight(2 * INNER, HIDDEN)], weight(HIDDEN, INNER)) for _ in range(EXPERTS)]  # type: ignore[misc]


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_each_pair_is_in_one_tile_of_its_expert(tokens: int, block: int, device: torch.device) -> None:
    ids = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens)).topk(TOP).indices.to(device)
    order, owners = sort_rows(ids, EXPERTS, block)
    rows = order.view(-1, block)
    assert sorted(order[order >= 0].tolist()) == list(range(tokens * TOP))
    for tile, expert in zip(rows, owners.tolist(), strict=True):
        pairs = tile[tile >= 0]
        assert bool((ids.flatten()[pairs] == expert).all())
        assert (expert >= 0) == (len(pairs) > 0)


@pytest.mark.parametrize("quantization", [None, "int8", "w4a16"])
@pytest.mark.parametrize("tokens", [1, 90])
def test_the_kernel_equals_the_loop(tokens: int, quantization: str | None, device: torch.device) -> None:
    given = random_experts(quantization, torch.float32, device)
    assert rejects(given) is None
    loop = ExpertLoop(given, ops.silu_mul, torch.float32, device, False)
    kernel = TritonExperts(given, ops.silu_mul, device)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device)
    scores = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(3)).to(device)
    weights, ids = scores.topk(TOP)
    torch.testing.assert_close(kernel(x, ids, weights), loop(x, ids, weights), rtol=1e-4, atol=1e-5)


def test_experts_of_different_formats_are_left_to_the_loop(device: torch.device) -> None:
    given = random_experts(None, torch.float32, device)
    given[1] = random_experts("int8", torch.float32, device)[1]
    assert rejects(given) == "the experts have different formats"
