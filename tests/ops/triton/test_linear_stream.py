"""Products in equal shares against the reference: blocks that one program finishes, and that many share."""

from __future__ import annotations

import pytest
import torch
from random_weights import quantized
from test_linear import assert_close, expected
from torch import Tensor

from octavo.ops.triton import runtime
from octavo.ops.triton.runtime import Tile
from octavo.ops.triton.weights import TritonCodes, TritonDense


@pytest.mark.parametrize("rows", [1, 10])
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize(
    "tile",
    [Tile(8, 16, 32, -1, 4, 3), Tile(16, 16, 64, -2, 4, 2), Tile(16, 16, 64, -5, 4, 3), Tile(8, 64, 256, -1, 4, 2)],
    ids=["long shares", "two a multiprocessor", "one tile a program", "one tile a block"],
)
def test_equal_shares(tile: Tile, gate: str | None, rows: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    plain = random(56, 144) / 144**0.5
    weight = TritonDense(plain, device)
    x, bias, residual = 3 * random(rows, 144), random(56), random(rows, 28 if gate else 56)
    everything = {"norm": random(144), "eps": 1e-5, "gate": gate, "residual": residual}
    for parts in ({"gate": gate}, everything):
        actual = weight.few(x, bias, torch.float32, tile=tile, **parts)
        assert_close(actual, expected(x, plain.float(), bias, **parts))
        assert torch.equal(actual, weight.few(x, bias, torch.float32, tile=tile, **parts))
    assert not runtime.counters(device).any()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 3072), (6144, 4096)])
@pytest.mark.parametrize("tile", [Tile(8, 64, 128, -1, 4, 6), Tile(64, 128, 64, -1, 8, 5), Tile(16, 64, 64, -2, 4, 5)])
def test_equal_shares_on_every_multiprocessor(tile: Tile, n: int, k: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(n)
    plain = (torch.randn(n, k, generator=generator) / k**0.5).bfloat16().to(device)
    x = torch.randn(tile.rows, k, generator=generator).bfloat16().to(device)
    weight = TritonDense(plain, device)
    for _ in range(3):  # each starts while the one before still runs
        actual = weight.few(x, out_dtype=torch.float32, tile=tile)
    assert_close(actual, expected(x, plain.float()))


def test_codes_take_no_equal_shares(device: torch.device) -> None:
    packed = quantized(32, 128, "4s", 64, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="are for bf16 weights, not int4"):
        TritonCodes(packed, device).few(torch.zeros(2, 128).bfloat16().to(device), tile=Tile(16, 16, 64, -1, 4, 2))


def test_the_fewest_rows_may_have_a_tile_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    few, more = Tile(8, 64, 128, -1, 4, 6), Tile(16, 64, 128, 2, 4, 5)
    monkeypatch.setattr(runtime, "tuned_tiles", lambda: {("bf16", 96, 64, 8): few, ("bf16", 96, 64, 16): more})
    choose = runtime.tile.__wrapped__  # without what was chosen before
    assert [choose("bf16", 96, 64, m) for m in (2, 8, 9, 16)] == [few, few, more, more]
    assert choose("bf16", 96, 64, 1) == runtime.default_tile("bf16", 96, 64, 1)
    assert choose("bf16", 96, 128, 8) == runtime.default_tile("bf16", 96, 128, 16)
