"""Products of 4-bit codes in the order of matrix fragments, against the dequantized weight in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_weights import quantized
from torch import Tensor

from octavo.ops import reference
from octavo.ops.packed_weight import TorchQuantized
from octavo.ops.triton import linear_fragments, runtime
from octavo.ops.triton.runtime import Tile
from octavo.ops.triton.weights_fragments import TritonFragments

TILES = [Tile(8, 64, 128, 3, 4, 2), Tile(16, 32, 128, 5, 2, 2), Tile(32, 64, 128, 1, 2, 2), Tile(128, 64, 128, 4, 4, 2)]


def make(kind: str, group: int, n: int, k: int, device: torch.device, seed: int) -> tuple[TritonFragments, Tensor]:
    packed = quantized(n, k, kind, group, torch.Generator().manual_seed(seed))
    plain = TorchQuantized(packed, torch.bfloat16, torch.device("cpu")).rows(torch.arange(n), torch.float32)
    return TritonFragments(packed, device), plain.to(device)


def error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", ["4s", "4z", "4m"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("rows", "n", "group"), [(1, 100, 128), (5, 72, 256), (19, 200, 512)])
def test_random_products(kind: str, tile: Tile, rows: int, n: int, group: int, device: torch.device) -> None:
    weight, plain = make(kind, group, n, 512, device, rows)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).bfloat16().to(device)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).bfloat16().to(device)
    actual = weight.few(x, bias, torch.float32, tile=tile)
    # the many-row tile rounds the weight to bf16, which the interpreter cuts off
    limit = 1e-5 if tile.rows < 128 else 6e-3 if runtime.is_native() else 2.5e-2
    assert error(actual, F.linear(x.float(), plain, bias.float())) < limit
    assert not runtime.counters(device).any()


@pytest.mark.parametrize("kind", ["4s", "4z"])
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 7])
def test_norm_gate_and_residual(kind: str, gate: str | None, rows: int, device: torch.device) -> None:
    weight, plain = make(kind, 128, 80, 384, device, 2)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    x, residual = 3 * random(rows, 384), random(rows, 40 if gate else 80)
    parts: dict[str, Any] = {"norm": random(384), "eps": 1e-5, "gate": gate, "residual": residual}
    wanted = F.linear(reference.rms_norm(x.float(), parts["norm"], 1e-5), plain)
    if gate is not None:
        wanted = (reference.silu_mul if gate == "silu" else reference.gelu_tanh_mul)(wanted)
    actual = weight.few(x, tile=Tile(8, 64, 128, 3, 4, 2), **parts)
    assert error(actual, wanted + residual.float()) < (6e-3 if runtime.is_native() else 1.2e-2)
    assert error(weight.few(x, **parts), wanted + residual.float()) < (6e-3 if runtime.is_native() else 1.2e-2)


def test_words_hold_the_codes_of_a_thread() -> None:
    codes = torch.randint(0, 256, (3, 128), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    words = linear_fragments.pack(codes)
    columns = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    assert words.shape == (3, 32)
    assert torch.equal(linear_fragments.unpack(words, 256), columns)
    e, u, q, i, o = 1, 3, 2, 1, 1
    assert int(words[2, 16 + 4 * q + 2 * i + o] >> 4 * (4 * e + u) & 15) == int(
        columns[2, 128 + 64 * o + 16 * u + 8 * i + 2 * q + e]
    )


@pytest.mark.parametrize("kind", ["4s", "4m"])
def test_rows_and_the_whole_weight(kind: str, device: torch.device) -> None:
    weight, plain = make(kind, 128, 70, 256, device, 4)
    ids = torch.tensor([[3, 69], [0, 3]], device=device)
    assert torch.equal(weight.rows(ids, torch.float32), plain[ids])
    assert torch.equal(weight.dense(), plain.bfloat16())


def test_tiles_and_groups_that_do_not_fit_are_refused(device: torch.device) -> None:
    weight, _ = make("4s", 128, 64, 256, device, 6)
    with pytest.raises(ValueError, match="no multiple of 16"):
        weight.few(torch.zeros(1, 256, device=device, dtype=torch.bfloat16), tile=Tile(8, 32, 128, 1, 4, 2))
    with pytest.raises(ValueError, match="groups of 64"):
        make("4s", 64, 64, 256, device, 6)
