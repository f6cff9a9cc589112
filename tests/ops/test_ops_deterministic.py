"""Deterministic operations on a CPU: the bits of a row do not depend on the others; refusals."""

from __future__ import annotations

import pytest
import torch
from random_weights import quantized

from octavo import ops
from octavo.errors import UserError
from octavo.ops import deterministic, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "4s", "8a"])
def test_a_product_has_the_same_bits_among_any_rows(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    n, k = 100, 192
    weight = torch.randn(n, k, generator=generator).to(dtype) / 14
    given = weight if kind == "dense" else quantized(n, k, kind, 64 if kind == "4s" else None, generator)
    packed = ops.pack_weight(given, dtype, "cpu", deterministic=True)
    x = torch.randn(130, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    whole = ops.linear(x, packed, bias)
    for count in (1, 3, 16, 17, 64):
        rows = torch.randperm(130, generator=generator)[:count]
        assert torch.equal(ops.linear(x[rows], packed, bias), whole[rows]), count
    wanted = ops.linear(x, ops.pack_weight(given, dtype), bias)
    torch.testing.assert_close(whole, wanted, rtol=0.02, atol=0.05 if dtype == torch.bfloat16 else 1e-4)
    assert ops.linear(x[:0], packed, bias).shape == (0, n)


@pytest.mark.parametrize("window", [None, 20])
def test_attention_of_a_row_is_that_of_a_decode(window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = ops.KVCache.allocate(8, 16, 2, 32, torch.float32, deterministic=True)
    k, v = torch.randn(2, 70, 2, 32, generator=generator)
    cache.scatter(torch.arange(16, 86), k, v)
    q = torch.randn(70, 4, 32, generator=generator)

    def attend(first: int, last: int) -> torch.Tensor:
        starts, lengths = torch.tensor([0, last - first]).int(), torch.tensor([last]).int()
        table = torch.arange(1, 6).int()[None]
        slots = torch.arange(16 + first, 16 + last)
        meta = ops.AttentionMetadata(starts, lengths, table, slots, last - first, last, int(last - first == 1))
        wanted = reference.paged_attention(q[first:last], cache, meta, 0.2, window, None, None)
        result = ops.paged_attention(q[first:last], cache, meta, 0.2, window)
        torch.testing.assert_close(result, wanted)
        return result

    whole = attend(0, 70)
    for first, last in ((0, 33), (33, 34), (34, 70)):
        assert torch.equal(attend(first, last), whole[first:last])


def test_blocks_hold_the_same_number_of_rows() -> None:
    weight = torch.randn(5, 8)
    x = torch.randn(deterministic.ROWS + 1, 8)
    torch.testing.assert_close(deterministic.linear_in_blocks(x, weight, None), x @ weight.T)


def test_what_no_deterministic_product_serves_is_refused() -> None:
    with pytest.raises(UserError, match="deterministic products serve") as caught:
        ops.pack_weight(torch.zeros(16, 64, device="meta"), torch.float16, "meta", deterministic=True)
    assert caught.value.param == "deterministic"
