"""The factors, against their formulas written out, and what is done to norms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.compress.clipping import clipped
from octavo.compress.observers import choose_grid
from octavo.compress.rounding import dequantize, quantize
from octavo.compress.simulation import FutureLayer, output_error, rounded_activations, simulated, weight_error
from octavo.compress.smoothing import (
    awq_candidates,
    exact_for_norm,
    log_equalization_factors,
    relative_magnitudes,
    smoothquant_factors,
    usable_factors,
)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_smoothquant_factors_are_the_formula() -> None:
    peaks, weights = rand(8).abs() * 5, [rand(4, 8, seed=1), rand(6, 8, seed=2)]
    weights[0][:, 3] = weights[1][:, 3] = 0
    factors = smoothquant_factors(peaks, weights, 0.8)
    for channel in range(8):
        largest = 2 * max(float(weight[:, channel].abs().max()) for weight in weights)
        expected = float(peaks[channel]) ** 0.8 / largest**0.2 if largest else float(peaks[channel])
        assert float(factors[channel]) == pytest.approx(expected, rel=1e-5)


def test_log_equalization_is_the_formula() -> None:
    peaks = torch.tensor([0.0, 1.0, 6.0, 1000.0])
    expected = peaks / torch.log2(2 + peaks)
    torch.testing.assert_close(log_equalization_factors(peaks)[1:], expected[1:])
    assert log_equalization_factors(peaks)[0] > 0


def test_relative_magnitudes_are_means_of_shares_of_the_group() -> None:
    weights = [rand(3, 8), rand(2, 8, seed=1)]
    shares = []
    for row in torch.cat(weights):
        for start in (0, 4):
            group = row[start : start + 4].abs()
            shares.append(group / (group.max() + 1e-6))
    expected = torch.cat(shares).reshape(5, 8).mean(dim=0)
    torch.testing.assert_close(relative_magnitudes(weights, 4), expected)


@pytest.mark.parametrize(("duo", "count"), [(True, 20), (False, 20), ("both", 20)])
def test_awq_tries_ones_and_powers(duo: bool | str, count: int) -> None:
    inputs, weights = rand(16).abs() + 0.01, rand(16, seed=1).abs()
    candidates = awq_candidates(inputs, weights, count, duo)
    assert len(candidates) == count + 1
    assert torch.equal(candidates[0], torch.ones(16))
    for factors in candidates:
        assert float(factors.max() * factors.min()) == pytest.approx(1, rel=1e-3)
    last = inputs / (weights.pow(0) + 1e-4) if duo is True else inputs
    torch.testing.assert_close(candidates[-1], last / (last.max() * last.min()).sqrt())


def test_factors_are_numbers_within_bounds() -> None:
    factors = usable_factors(torch.tensor([torch.nan, torch.inf, 0.0, -1.0, 2.0, 1e9]))
    assert factors.tolist() == pytest.approx([1, 1, 1e-4, 1e-4, 2, 1e4])


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_stays_storable_and_the_product_exact(offset: float) -> None:
    weight = rand(256).to(torch.bfloat16).float()
    weight[7] = -offset  # a channel that is switched off
    factors = torch.rand(256, generator=torch.Generator().manual_seed(1)) * 3 + 0.2
    divided, exact = exact_for_norm(factors, weight, offset)
    assert torch.equal(divided.to(torch.bfloat16).float(), divided)
    torch.testing.assert_close((divided + offset) * exact, weight + offset, rtol=1e-6, atol=1e-7)
    assert exact[7] == 1
    assert (exact > 0).all()
    close = (exact / factors - 1).abs() < 0.02
    assert close.float().mean() > 0.9


def outlier_inputs(columns: int = 64, tokens: int = 300) -> Tensor:
    inputs = rand(tokens, columns, seed=5)
    inputs[:, ::16] *= 20
    return inputs


@pytest.mark.parametrize("scheme", [WeightScheme(4, group_size=32), WeightScheme(8, strategy="channel")])
def test_the_error_by_moments_is_that_of_the_outputs(scheme: WeightScheme) -> None:
    inputs, weight = outlier_inputs(), rand(24, 64, seed=6)
    layer = FutureLayer(weight, scheme, "imatrix_signed")
    factors = torch.rand(64, generator=torch.Generator().manual_seed(2)) + 0.5
    hessian = inputs.t() @ inputs
    divided = inputs / factors
    grid = choose_grid(weight * factors, divided.square().sum(dim=0), scheme, "imatrix_signed", torch.float32)
    rounded = dequantize(quantize(weight * factors, grid, scheme), grid, scheme)
    expected = float((divided @ rounded.t() - inputs @ weight.t()).square().sum())
    assert weight_error([layer], hessian, factors) == pytest.approx(expected, rel=1e-3)
    assert output_error([layer], inputs, [inputs @ weight.t()], hessian.diagonal(), factors) == pytest.approx(
        expected, rel=1e-3
    )


def test_activations_are_rounded_a_row_at_a_time() -> None:
    inputs = outlier_inputs()
    rounded = rounded_activations(inputs, ActivationScheme())
    step = inputs.abs().amax(dim=1, keepdim=True) / 127
    assert ((rounded - inputs).abs() <= 0.5001 * step).all()
    static = rounded_activations(inputs, ActivationScheme(strategy="tensor", dynamic=False))
    levels = static / (inputs.abs().max() / 127)
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-3)
    assert int(levels.abs().max().round()) == 127


def test_sampled_rows_stand_for_all_of_a_large_weight() -> None:
    inputs, weight = outlier_inputs(), rand(4096, 64, seed=7)
    layer = FutureLayer(weight, WeightScheme(4, group_size=32), "signed")
    sampled = layer.sampled()
    assert len(sampled.weight) == 512
    hessian, ones = inputs.t() @ inputs, torch.ones(64)
    assert 8 * weight_error([sampled], hessian, ones) == pytest.approx(weight_error([layer], hessian, ones), rel=0.05)
    whole = FutureLayer(weight, WeightScheme(8, strategy="tensor"), "minmax")
    assert whole.sampled() is whole


def test_clipping_takes_the_best_bound_of_each_group() -> None:
    inputs, weight = outlier_inputs(), rand(6, 64, seed=8)
    weight[:, 5] *= 6  # an outlier that makes the steps of its group coarse, on an input that is small
    scheme, hessian = WeightScheme(3, group_size=32), inputs.t() @ inputs
    cut = clipped(FutureLayer(weight, scheme, "minmax"), hessian)

    def errors(candidate: Tensor) -> Tensor:
        grid = choose_grid(candidate, None, scheme, "minmax", torch.float32)
        difference = dequantize(quantize(candidate, grid, scheme), grid, scheme) - weight
        parts = [difference[:, at : at + 32] @ inputs[:, at : at + 32].t() for at in (0, 32)]
        return torch.stack([part.square().sum(dim=1) for part in parts], dim=1)

    tried = []
    for step in range(10):
        bound = weight.unflatten(1, (2, 32)).abs().amax(dim=-1, keepdim=True) * (1 - step / 20)
        tried.append(errors(weight.unflatten(1, (2, 32)).clamp(-bound, bound).flatten(1)))
    torch.testing.assert_close(errors(cut), torch.stack(tried).amin(dim=0), rtol=1e-4, atol=1e-3)
    assert errors(cut).sum() < errors(weight).sum()
    assert clipped(FutureLayer(weight, WeightScheme(8, strategy="tensor"), "minmax"), hessian) is weight


def test_a_simulated_block_computes_as_if_quantized_and_is_itself_again() -> None:
    inputs, block = outlier_inputs(), torch.nn.Sequential(torch.nn.Linear(64, 24, bias=False))
    weight = block[0].weight.detach().clone()
    layer = FutureLayer(weight, WeightScheme(8, strategy="channel", activations=ActivationScheme()), "minmax")
    factors = torch.rand(64, generator=torch.Generator().manual_seed(2)) + 0.5
    importance = inputs.square().sum(dim=0)
    with torch.no_grad(), simulated(block, {"0": layer}, importance, factors):
        error = float((block(inputs) - inputs @ weight.t()).square().sum())
    expected = output_error([layer], inputs, [inputs @ weight.t()], importance, factors)
    assert error == pytest.approx(expected, rel=1e-3)
    assert torch.equal(block[0].weight, weight)
    torch.testing.assert_close(block(inputs), inputs @ weight.t())
