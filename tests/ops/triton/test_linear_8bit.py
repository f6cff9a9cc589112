"""Products of 8-bit rows and weights against exact sums."""

from __future__ import annotations

import pytest
import torch
from eight_bit import operands, relative_error

from octavo.ops.triton import runtime
from octavo.ops.triton.linear_8bit import TORCH, UNSCALED, default_tile, linear_8bit, linear_for_reader
from octavo.ops.triton.linear_8bit_parts import apply_scales
from octavo.ops.triton.runtime import Tile
from octavo.ops.triton.scaled import Scaled

KINDS = ("int8", "fp8")
ONE = (Tile(1, 4, 64, 1, 4, 1), Tile(1, 8, 256, 1, 4, 1))
FEW = (Tile(16, 64, 64, 1, 4, 2), Tile(16, 32, 32, 3, 4, 2), Tile(32, 64, 128, 2, 4, 2), Tile(16, 32, 64, -2, 4, 2))
MANY = (Tile(32, 32, 64, 0, 4, 2), Tile(64, 256, 32, 0, 4, 2))


def tolerance(kind: str, device: torch.device) -> float:
    """Sums of float8 products lose digits in a GPU's matrix units, and half floats stand in for them elsewhere."""
    return 1e-6 if kind == "int8" else 2e-3 if device.type == "cuda" else 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", FEW + MANY)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 192), (5, 100, 144), (40, 64, 128)])
def test_products(m: int, n: int, k: int, tile: Tile, kind: str, device: torch.device) -> None:
    codes, scale, weight, weight_scale, exact = operands(m, n, k, kind, device)
    y = linear_8bit(codes, scale, weight, weight_scale, None, torch.float32, tile=tile)
    assert y.shape == (m, n)
    assert relative_error(y, exact) < tolerance(kind, device)
    counters = runtime.counters(device)
    assert not counters.any()
    assert torch.equal(linear_8bit(codes, scale, weight, weight_scale, None, torch.float32, tile=tile), y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", ONE)
@pytest.mark.parametrize(("n", "k"), [(96, 192), (30, 144), (8, 256)])
def test_one_row(n: int, k: int, tile: Tile, kind: str, device: torch.device) -> None:
    codes, scale, weight, weight_scale, exact = operands(1, n, k, kind, device)
    y = linear_8bit(codes, scale, weight, weight_scale, None, torch.float32, tile=tile)
    assert relative_error(y, exact) < 1e-6
    generator = torch.Generator().manual_seed(3)
    bias, residual = (torch.randn(size, generator=generator).bfloat16().to(device) for size in [(n,), (1, n)])
    expected = exact + bias.double() + residual.double()
    assert linear_8bit(codes, scale, weight, weight_scale, bias, torch.bfloat16, residual, tile) is residual
    assert relative_error(residual, expected) < 8e-3


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_of_every_code(kind: str, device: torch.device) -> None:
    """All pairs of E4M3 numbers, or of int8 codes."""
    every = torch.arange(256).to(torch.uint8)
    if kind == "fp8":
        every[every % 128 == 127] = 0  # not numbers
    codes = every[None].view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    weight = torch.stack([every.roll(i) for i in range(256)]).view(codes.dtype)
    exact = codes.double() @ weight.double().T
    ones = torch.ones(256, device=device)
    y = linear_8bit(codes.to(device), ones[:1, None], weight.to(device), ones, None, torch.float32, tile=ONE[0])
    assert float((y.cpu().double() - exact).abs().max() / exact.abs().max()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [FEW[0], FEW[1], *MANY, TORCH, UNSCALED])
def test_bias_residual_and_rounding(tile: Tile, kind: str, device: torch.device) -> None:
    codes, scale, weight, weight_scale, exact = operands(7, 80, 96, kind, device)
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(80, generator=generator).bfloat16().to(device)
    residual = torch.randn(7, 80, generator=generator).bfloat16().to(device)
    y = linear_8bit(codes, scale, weight, weight_scale, bias, torch.bfloat16, tile=tile)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, exact + bias.double()) < 8e-3
    expected = exact + bias.double() + residual.double()
    assert linear_8bit(codes, scale, weight, weight_scale, bias, torch.bfloat16, residual, tile) is residual
    assert relative_error(residual, expected) < 8e-3


@pytest.mark.parametrize("kind", KINDS)
def test_default_tiles_and_no_rows(kind: str, device: torch.device) -> None:
    for rows in (0, 1, 33):
        codes, scale, weight, weight_scale, exact = operands(rows, 64, 192, kind, device)
        y = linear_8bit(codes, scale, weight, weight_scale, None, torch.float32)
        assert y.shape == (rows, 64)
        if rows:
            assert relative_error(y, exact) < tolerance(kind, device)


@pytest.mark.parametrize("rows", [1, 40])
def test_products_that_leave_their_scales_to_the_reader(rows: int, device: torch.device) -> None:
    codes, scale, weight, weight_scale, exact = operands(rows, 64, 192, "fp8", device)
    y = linear_for_reader(codes, scale, weight, weight_scale)
    assert isinstance(y, Scaled) == (rows > 32)
    if isinstance(y, Scaled):
        assert y.values.dtype == torch.bfloat16
        assert relative_error(y.values.double() * y.row * y.column, exact) < 3e-3
        y = apply_scales(y)
    assert relative_error(y, exact) < 5e-3
    integers = operands(rows, 64, 192, "int8", device)
    assert relative_error(linear_for_reader(*integers[:4]), integers[4]) < 5e-3  # type: ignore[arg-type]


def test_scales_applied_after_a_product(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    values, residual = (torch.randn(5, 1100, generator=generator).bfloat16().to(device) for _ in range(2))
    row, column = torch.rand(5, 1, generator=generator).to(device), torch.rand(1100, generator=generator).to(device)
    bias = torch.randn(1100, generator=generator).bfloat16().to(device)
    expected = values.double() * row * column + bias.double()
    total = expected + residual.double()
    assert apply_scales(Scaled(values.clone(), row, column), bias, residual) is residual
    assert relative_error(residual, total) < 8e-3
    assert relative_error(apply_scales(Scaled(values, row, column), bias), expected) < 8e-3


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (28672, 4096), (576, 576), (64, 64)])
@pytest.mark.parametrize("m", [16, 64, 128, 256, 8192])
def test_default_tiles_fit_the_kernels(n: int, k: int, m: int) -> None:
    assert default_tile(n, k, 1).rows == 1
    tile = default_tile(n, k, m)
    assert tile.rows >= 16
    assert (tile.split == 0) == (m > 128)
    shared = (tile.rows + tile.n) * tile.k * tile.stages
    assert shared <= 200 << 10
