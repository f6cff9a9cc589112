"""`ops.experts` against a sum written out token by token, for plain and quantized experts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.checkpoint.base import dense
from octavo.layers.quantize import quantize_weight

HIDDEN, INNER, EXPERTS, TOP = 64, 32, 6, 2


def random_experts(quantization: str | None, split: bool) -> list[ops.Expert]:
    generator = torch.Generator().manual_seed(1)

    def weight(rows: int, columns: int) -> object:
        value = torch.randn(rows, columns, generator=generator) / 8
        return value if quantization is None else quantize_weight(value, quantization)

    gate_up = [[weight(INNER, HIDDEN)] * 2 if split else [weight(2 * INNER, HIDDEN)] for _ in range(EXPERTS)]
    return [(parts, weight(HIDDEN, INNER)) for parts in gate_up]  # type: ignore[misc]


def expected(x: Tensor, ids: Tensor, weights: Tensor, given: list[ops.Expert]) -> Iterator[Tensor]:
    for row, chosen, shares in zip(x, ids.tolist(), weights, strict=True):
        out = torch.zeros(HIDDEN)
        for expert, share in zip(chosen, shares, strict=True):
            gate_up, down = given[expert]
            gate, up = torch.cat([dense(part) for part in gate_up]).matmul(row).chunk(2)  # type: ignore[arg-type]
            out += share * dense(down).matmul(torch.nn.functional.silu(gate) * up)  # type: ignore[arg-type]
        yield out


@pytest.mark.parametrize("split", [False, True], ids=["merged", "parts"])
@pytest.mark.parametrize("quantization", [None, "int8", "w4a16"])
def test_experts_equal_a_sum_token_by_token(quantization: str | None, split: bool) -> None:
    given = random_experts(quantization, split)
    packed = ops.pack_experts(iter(given), ops.silu_mul, torch.float32)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
    scores = torch.rand(9, EXPERTS, generator=torch.Generator().manual_seed(3))
    weights, ids = scores.topk(TOP)
    got = ops.experts(x, ids, weights, packed)
    torch.testing.assert_close(got, torch.stack(list(expected(x, ids, weights, given))), rtol=1e-5, atol=1e-5)
    assert packed.num_experts == EXPERTS
    assert packed.num_bytes > 0


def test_rows_do_not_depend_on_each_other_when_deterministic() -> None:
    packed = ops.pack_experts(iter(random_experts(None, False)), ops.silu_mul, torch.float32, deterministic=True)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
    weights, ids = torch.rand(9, EXPERTS, generator=torch.Generator().manual_seed(3)).topk(TOP)
    together = ops.experts(x, ids, weights, packed)
    alone = torch.cat([ops.experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], packed) for i in range(9)])
    assert torch.equal(together, alone)
