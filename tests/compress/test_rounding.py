"""Number formats, rounding and observers against compressed-tensors and against exhaustive search."""

from __future__ import annotations

import pytest
import torch

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.number_formats import FP4, FP8, integer
from octavo.compress.observers import OBSERVERS, Fit, Target, choose_grid, imatrix_signed, minmax, mse, observer
from octavo.compress.rounding import Grid, ScaleKind, dequantize, quantize
from octavo.errors import UserError

PLAIN = ScaleKind(torch.float32)
FOUR = Target(integer(4), PLAIN)
SCHEME = WeightScheme(4, group_size=32)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (3, 32), (8, 32), (8, None)])
def test_rtn_rounds_as_compressed_tensors_does(bits: int, group: int | None, symmetric: bool) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as oracle
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(bits)
    weight = torch.randn(24, 96)
    scheme = WeightScheme(bits, strategy="group" if group else "channel", group_size=group, symmetric=symmetric)
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy=scheme.strategy, group_size=group)
    grouped = weight.reshape(24, scheme.num_groups(96), -1)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    grid = choose_grid(weight, None, scheme, "minmax", torch.float32)
    torch.testing.assert_close(grid.scale, scale)
    if not symmetric:
        assert grid.zero_point is not None
        assert torch.equal(grid.zero_point, zero.to(torch.int8))
    expected = oracle(weight, scale, zero, args, dtype=torch.int8)
    given = Grid(scale, None if symmetric else zero.to(torch.int8))
    assert torch.equal(quantize(weight, given, scheme), expected)


def test_small_floats_round_to_the_nearest_value_and_ties_to_even() -> None:
    values = torch.cat((torch.randn(4000) * 3, torch.arange(-8, 8, 0.125), torch.tensor([1e-9, -1e-9, 0.0, 1e9, -1e9])))
    nearest = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(FP8.round_(values.clone()), nearest)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    found = FP4.round_(values.clone())
    distance = (values.abs().clamp(max=6)[:, None] - grid).abs()
    assert torch.equal((values.clamp(-6, 6) - found).abs(), distance.amin(dim=1))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert FP4.round_(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("number", [integer(3), FP4, FP8])
def test_codes_mean_their_levels(number) -> None:  # type: ignore[no-untyped-def]
    levels = number.round_(torch.randn(500) * number.high)
    assert torch.equal(number.decode(number.encode(levels)), levels)


def test_dequantize_inverts_codes() -> None:
    codes = torch.randint(-8, 8, (5, 64), dtype=torch.int8)
    grid = Grid(torch.rand(5, 2) + 0.1)
    assert torch.equal(quantize(dequantize(codes, grid, SCHEME), grid, SCHEME), codes)
    assert dequantize(codes, Grid(-grid.scale), SCHEME).equal(-dequantize(codes, grid, SCHEME))
    shifted = Grid(grid.scale, torch.randint(-8, 8, (5, 2), dtype=torch.int8))
    asymmetric = WeightScheme(4, group_size=32, symmetric=False)
    assert torch.equal(quantize(dequantize(codes, shifted, asymmetric), shifted, asymmetric), codes)


def test_blocks_need_not_divide_the_weight() -> None:
    scheme = WeightScheme(8, "float", strategy="block", block_structure=(16, 32))
    weight = torch.randn(40, 80)
    grid = choose_grid(weight, torch.rand(80), scheme, "minmax", torch.float32)
    assert grid.scale.shape == (3, 3)
    torch.testing.assert_close(grid.scale[2, 2], weight[32:, 64:].abs().max() / 448)
    torch.testing.assert_close(dequantize(quantize(weight, grid, scheme), grid, scheme), weight, rtol=0.07, atol=1e-3)


def test_scales_are_exact_in_the_stored_dtype_and_never_zero() -> None:
    scale = ScaleKind(torch.bfloat16).usable(torch.tensor([0.0, 1 / 3]))
    assert scale[0] > 0
    assert torch.equal(scale, scale.bfloat16().float())
    for symmetric in (True, False):
        scheme = WeightScheme(4, group_size=32, symmetric=symmetric)
        for name in OBSERVERS:
            grid = choose_grid(torch.zeros(3, 64), torch.ones(64), scheme, name, torch.bfloat16)
            assert torch.isfinite(grid.scale).all()
            assert not dequantize(quantize(torch.zeros(3, 64), grid, scheme), grid, scheme).any()


def _error(weight: torch.Tensor, importance: torch.Tensor | float, fit: Fit, target: Target = FOUR) -> torch.Tensor:
    rounded = target.levels(weight, fit) * fit.scale[:, None]
    return ((rounded - weight).square() * importance).sum(dim=1)


def test_signed_scales_come_close_to_an_exhaustive_search() -> None:
    torch.manual_seed(0)
    weight, importance = torch.randn(40, 32), torch.rand(32) + 0.05
    found = _error(weight, importance, imatrix_signed(weight, importance, FOUR))
    peak = weight.abs().amax(dim=1)
    best = torch.full((40,), torch.inf)
    for step in range(1, 400):
        for sign in (-1, 1):
            best = torch.minimum(best, _error(weight, importance, Fit(sign * peak / 7 * step / 300)))
    assert float((found / best).mean()) < 1.06
    assert float((found / _error(weight, importance, minmax(weight, None, FOUR))).mean()) < 0.9


@pytest.mark.parametrize("number", [integer(4), integer(3), FP4])
def test_fitted_asymmetric_and_float_grids_beat_minmax(number) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    weight, importance = torch.randn(60, 32) + 0.7 * torch.randn(60, 1), torch.rand(32) + 0.05
    for target in [Target(number, PLAIN), Target(number, PLAIN, symmetric=False)][: 2 if number.is_integer else 1]:
        found = _error(weight, importance, imatrix_signed(weight, importance, target), target)
        plain = _error(weight, importance, minmax(weight, None, target), target)
        assert float((found / plain).mean()) < 0.92
    powers = Target(FP4, ScaleKind(torch.uint8, 6.0, power_of_two=True))
    fit = imatrix_signed(weight, importance, powers)
    assert torch.equal(torch.exp2(torch.log2(fit.scale).round()), fit.scale)
    assert bool((_error(weight, importance, fit, powers)
                 <= _error(weight, importance, minmax(weight, None, powers), powers) + 1e-6).all())  # fmt: skip


def _power(weight: torch.Tensor, fit: Fit) -> torch.Tensor:
    return (FOUR.levels(weight, fit) * fit.scale[:, None] - weight).abs().pow(2.4).sum(dim=1)


def test_mse_is_never_worse_than_minmax_and_importance_matters() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 64)
    assert bool((_power(weight, mse(weight, None, FOUR)) <= _power(weight, minmax(weight, None, FOUR)) + 1e-6).all())
    importance = torch.ones(64)
    importance[:8] = 100
    for name in ("imatrix_mse", "imatrix_signed"):
        weighed, plain = OBSERVERS[name](weight, importance, FOUR), OBSERVERS[name](weight, None, FOUR)
        assert _error(weight, importance, weighed).sum() < _error(weight, importance, plain).sum()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", list(OBSERVERS))
def test_groups_are_chosen_for_at_once_as_one_by_one(name: str, symmetric: bool) -> None:
    """On a GPU all groups are one tensor, on the CPU each has a thread."""
    weight, importance = torch.randn(3, 10, 32), torch.rand(3, 1, 32)
    target = Target(integer(4), ScaleKind(torch.bfloat16), symmetric)
    together = OBSERVERS[name](weight, importance, target)
    for group in range(3):
        alone = OBSERVERS[name](weight[group], importance[group], target)
        torch.testing.assert_close(together.scale[group], alone.scale)
        if not symmetric:
            assert together.zero is not None and alone.zero is not None
            torch.testing.assert_close(together.zero[group], alone.zero)


def test_unknown_observer_names_the_known() -> None:
    with pytest.raises(UserError, match="imatrix_signed"):
        observer("median")
