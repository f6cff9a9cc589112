"""The blocked GPTQ against a naive one, and what it does with Hessians that are hard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.gptq_solver import GPTQSettings, inverse_factor, solve
from octavo.compress.modifiers.base import LinearLayer
from octavo.compress.modifiers.gptq import GPTQModifier
from octavo.compress.observers import choose_scales
from octavo.compress.rounding import dequantize, quantize
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError


def correlated_inputs(columns: int, tokens: int = 512, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.3 * torch.randn(columns, columns, generator=generator) / columns**0.5 * 3
    return torch.randn(tokens, columns, generator=generator) @ mix * (torch.rand(columns, generator=generator) + 0.1)


def naive_gptq(weight: Tensor, hessian: Tensor, scale: Tensor, bits: int, damping: float, act_order: bool) -> Tensor:
    """Column by column in float64, the inverse recomputed for each remaining set of columns: the textbook's steps."""
    columns = weight.shape[1]
    group = columns // scale.shape[1]
    order = torch.argsort(hessian.diagonal(), descending=True) if act_order else torch.arange(columns)
    damped = hessian.double() + damping * hessian.diagonal().double().mean() * torch.eye(columns, dtype=torch.float64)
    work = weight.double().clone()
    codes = torch.zeros_like(weight, dtype=torch.int8)
    for place, column in enumerate(order.tolist()):
        rest = order[place:]
        inverse = torch.linalg.inv(damped[rest][:, rest])
        step = scale[:, column // group].double()
        code = (work[:, column] / step).round().clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        codes[:, column] = code.to(torch.int8)
        error = (work[:, column] - code * step) / inverse[0, 0]
        work[:, rest] -= error[:, None] * inverse[0][None, :]
    return codes


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(
    ("scheme", "block"), [(WeightScheme(4, group_size=32), 128), (WeightScheme(8, strategy="channel"), 40)]
)
def test_blocked_solver_equals_the_naive_one(scheme: WeightScheme, block: int, act_order: bool) -> None:
    inputs = correlated_inputs(96)
    hessian = inputs.t() @ inputs
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(5))
    settings = GPTQSettings(block_size=block, act_order=act_order)
    solution = solve(weight, hessian, scheme, settings, torch.float32)
    expected = naive_gptq(weight, hessian, solution.scale, scheme.num_bits, 0.01, act_order)
    # A tie that falls the other way in float32 changes what follows in its row, so a few codes may differ.
    same = (solution.codes == expected).float().mean()
    assert same > 0.995
    error = (dequantize(solution.codes, solution.scale) - weight) @ inputs.t()
    torch.testing.assert_close(solution.error, error.square().sum(dim=1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(solution.norm, (weight @ inputs.t()).square().sum(dim=1), rtol=1e-3, atol=1e-3)


def test_gptq_beats_rounding_and_block_size_does_not_matter() -> None:
    inputs = correlated_inputs(128)
    hessian = inputs.t() @ inputs
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(6))
    scheme = WeightScheme(4, group_size=32)
    errors = []
    for block in (1, 50, 128, 1000):
        solution = solve(weight, hessian, scheme, GPTQSettings(block_size=block), torch.float32)
        errors.append(float(solution.error.sum()))
    scale = choose_scales(weight, hessian.diagonal(), scheme, "imatrix_signed", torch.float32)
    rounded = (dequantize(quantize(weight, scale, 4), scale) - weight) @ inputs.t()
    assert max(errors) < 0.75 * float(rounded.square().sum())
    assert max(errors) < 1.02 * min(errors)


def test_inverse_factor_is_the_cholesky_factor_of_the_inverse() -> None:
    inputs = correlated_inputs(48)
    hessian = inputs.t() @ inputs
    factor, damping = inverse_factor(hessian, 0.01)
    assert damping == 0.01
    assert factor is not None
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(48, dtype=torch.float64)
    expected = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    torch.testing.assert_close(factor.double(), expected, rtol=1e-3, atol=1e-5)


def test_dead_inputs_get_zero_weights_and_are_counted() -> None:
    inputs = correlated_inputs(64)
    inputs[:, [3, 40]] = 0
    weight = torch.randn(8, 64)
    solution = solve(weight, inputs.t() @ inputs, WeightScheme(4, group_size=32), GPTQSettings(), torch.float32)
    assert solution.dead == 2
    assert not solution.codes[:, [3, 40]].any()
    assert torch.isfinite(solution.error).all()
    everything_dead = solve(weight, torch.zeros(64, 64), WeightScheme(4, group_size=32), GPTQSettings(), torch.float32)
    assert everything_dead.dead == 64
    assert torch.isfinite(everything_dead.scale).all()


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
    assert torch.equal(result.codes, quantize(layer.weight, result.grid, layer.scheme))


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
        assert (result.codes == alone.codes).float().mean() > 0.995
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
