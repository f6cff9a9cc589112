"""The blocked GPTQ against a naive one, and what it does with Hessians that are hard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.gptq_solver import GPTQSettings, inverse_factor, solve
from octavo.compress.modifiers.base import LinearLayer
from octavo.compress.modifiers.gptq import GPTQModifier
from octavo.compress.number_formats import format_of
from octavo.compress.observers import choose_grid
from octavo.compress.rounding import Grid, dequantize, group_width, quantize
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError


def correlated_inputs(columns: int, tokens: int = 512, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.3 * torch.randn(columns, columns, generator=generator) / columns**0.5 * 3
    return torch.randn(tokens, columns, generator=generator) @ mix * (torch.rand(columns, generator=generator) + 0.1)


def naive_gptq(
    weight: Tensor, hessian: Tensor, grid: Grid, scheme: WeightScheme, act_order: bool, mask: Tensor | None = None
) -> Tensor:
    """Column by column in float64, the inverse recomputed for each remaining set of columns: the textbook's steps.

    Gives the values that the weights become.
    """
    width, number = group_width(scheme, weight.shape[1]), format_of(scheme)
    order = torch.argsort(hessian.diagonal(), descending=True) if act_order else torch.arange(weight.shape[1])
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(len(order), dtype=torch.float64)
    work, found = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    steps = grid.steps(scheme, len(weight)).double()
    for place, column in enumerate(order.tolist()):
        rest = order[place:]
        inverse = torch.linalg.inv(damped[rest][:, rest])
        step, group = steps[:, column // width], column // width
        zero = 0.0 if grid.zero_point is None else grid.zero_point[:, group].double()
        level = number.round_((work[:, column] / step + zero).float()).double() - zero
        if mask is not None:
            level[mask[:, column]] = 0
        found[:, column] = level * step
        error = (work[:, column] - found[:, column]) / inverse[0, 0]
        work[:, rest] -= error[:, None] * inverse[0][None, :]
    return found.float()


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(
    ("scheme", "block"),
    [
        (WeightScheme(4, group_size=32), 128),
        (WeightScheme(4, group_size=32, symmetric=False), 128),
        (WeightScheme(8, strategy="channel"), 40),
        (WeightScheme(8, "float", strategy="tensor"), 128),
        (WeightScheme(8, "float", strategy="block", block_structure=(16, 64)), 50),
        (WeightScheme(4, "float", strategy="tensor_group", group_size=16), 128),
        (WeightScheme(4, "float", group_size=32), 128),
    ],
)
def test_blocked_solver_equals_the_naive_one(scheme: WeightScheme, block: int, act_order: bool) -> None:
    inputs = correlated_inputs(96)
    hessian = inputs.t() @ inputs
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(5))
    settings = GPTQSettings(block_size=block, act_order=act_order)
    solution = solve([weight], hessian, scheme, settings, torch.float32)[0]
    found = dequantize(solution.codes, solution.grid, scheme)
    expected = naive_gptq(weight, hessian, solution.grid, scheme, act_order)
    # A tie that falls the other way in float32 changes what follows in its row, so a few codes may differ.
    assert torch.isclose(found, expected, rtol=1e-5, atol=1e-6).float().mean() > 0.985
    error = (found - weight) @ inputs.t()
    torch.testing.assert_close(solution.error, error.square().sum(dim=1), rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(solution.norm, (weight @ inputs.t()).square().sum(dim=1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_pruned_weights_stay_zero_and_the_others_make_up_for_them(symmetric: bool) -> None:
    inputs = correlated_inputs(64)
    hessian = inputs.t() @ inputs
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(7))
    mask = torch.rand(16, 64, generator=torch.Generator().manual_seed(8)) < 0.5
    weight = weight.masked_fill(mask, 0.0)
    scheme = WeightScheme(4, group_size=32, symmetric=symmetric)
    plain, solution = (solve([weight], hessian, scheme, GPTQSettings(), torch.float32, [m])[0] for m in (None, mask))
    found = dequantize(solution.codes, solution.grid, scheme)
    assert not found[mask].any()
    assert dequantize(plain.codes, plain.grid, scheme)[mask].any()
    expected = naive_gptq(weight, hessian, solution.grid, scheme, True, mask)
    assert torch.isclose(found, expected, rtol=1e-5, atol=1e-6).float().mean() > 0.985
    rounded = dequantize(quantize(weight, solution.grid, scheme), solution.grid, scheme).masked_fill(mask, 0.0)
    assert solution.error.sum() < 0.92 * ((rounded - weight) @ inputs.t()).square().sum()


def test_gptq_beats_rounding_and_block_size_does_not_matter() -> None:
    inputs = correlated_inputs(128)
    hessian = inputs.t() @ inputs
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(6))
    scheme = WeightScheme(4, group_size=32)
    errors = []
    for block in (1, 50, 128, 1000):
        solution = solve([weight], hessian, scheme, GPTQSettings(block_size=block), torch.float32)[0]
        errors.append(float(solution.error.sum()))
    grid = choose_grid(weight, hessian.diagonal(), scheme, "imatrix_signed", torch.float32)
    rounded = (dequantize(quantize(weight, grid, scheme), grid, scheme) - weight) @ inputs.t()
    assert max(errors) < 0.75 * float(rounded.square().sum())
    assert max(errors) < 1.02 * min(errors)


@pytest.mark.parametrize("size", [48, 401])
def test_inverse_factor_is_the_cholesky_factor_of_the_inverse(size: int) -> None:
    inputs = correlated_inputs(size, tokens=1024)
    hessian, order = inputs.t() @ inputs, torch.randperm(size)
    before = hessian.clone()
    factor, damping = inverse_factor(hessian, order, 0.01)
    assert damping == 0.01
    assert factor is not None
    assert torch.equal(hessian, before)
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(size, dtype=torch.float64)
    expected = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
    torch.testing.assert_close(factor.double(), expected, rtol=1e-3, atol=1e-4)


def test_dead_inputs_get_zero_weights_and_are_counted() -> None:
    inputs = correlated_inputs(64)
    inputs[:, [3, 40]] = 0
    weight = torch.randn(8, 64)
    scheme = WeightScheme(4, group_size=32)
    solution = solve([weight], inputs.t() @ inputs, scheme, GPTQSettings(), torch.float32)[0]
    assert solution.dead == 2
    assert not solution.codes[:, [3, 40]].any()
    assert torch.isfinite(solution.error).all()
    everything_dead = solve([weight], torch.zeros(64, 64), scheme, GPTQSettings(), torch.float32)[0]
    assert everything_dead.dead == 64
    assert torch.isfinite(everything_dead.grid.scale).all()


def _indefinite(size: int, smallest: float) -> Tensor:
    """A symmetric matrix of mean diagonal 1 whose smallest eigenvalue is given (negative)."""
    generator = torch.Generator().manual_seed(2)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator))
    values = torch.ones(size)
    values[0] = smallest
    return (basis * values) @ basis.t()


def test_a_hessian_that_is_not_positive_definite_gets_more_damping() -> None:
    layer = LinearLayer("a.b", torch.randn(8, 64), WeightScheme(4, group_size=32), torch.float32)
    result = _quantize_with(layer, _indefinite(64, -0.05))
    assert result.details["damping"] == pytest.approx(0.1)
    assert "a.b: the Hessian needed a damping of 0.1" in result.notes[0]


def test_a_hopeless_hessian_means_rounding_and_a_note() -> None:
    layer = LinearLayer("a.b", torch.randn(8, 64), WeightScheme(4, group_size=32), torch.float32)
    hessian = _indefinite(64, -20.0)
    result = _quantize_with(layer, hessian)
    assert result.details["damping"] is None
    assert "only rounded" in result.notes[0]
    assert torch.equal(result.codes, quantize(layer.weight, result.grid, WeightScheme(4, group_size=32)))


def _quantize_with(layer: LinearLayer, hessian: Tensor):  # type: ignore[no-untyped-def]
    inputs = InputStatistics(hessian.shape[0], {"hessian"})
    inputs.tokens = 1
    inputs._squares = hessian.clone()
    return GPTQModifier(scheme="W4A16").quantize([layer], inputs)[0]


def test_layers_of_one_input_are_solved_together_as_alone() -> None:
    inputs = correlated_inputs(64)
    statistics = InputStatistics(64, {"hessian"})
    statistics.add(inputs.reshape(8, 64, 64))
    scheme = WeightScheme(4, group_size=32)
    layers = [LinearLayer(f"l{i}", torch.randn(n, 64), scheme, torch.float32) for i, n in enumerate((8, 24, 4))]
    modifier = GPTQModifier(scheme="W4A16")
    together = modifier.quantize(layers, statistics)
    for layer, result in zip(layers, together, strict=True):
        alone = modifier.quantize([layer], statistics)[0]
        assert result.codes is not None and alone.codes is not None
        assert torch.eq(result.codes, alone.codes).float().mean() > 0.995
        assert result.error == pytest.approx(alone.error, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dampening_frac": 0}, "dampening_frac is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"actorder": "group"}, "actorder is 'group'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GPTQModifier(scheme="W4A16", **arguments)  # type: ignore[arg-type]
