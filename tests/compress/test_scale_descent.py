"""Scales of round-to-nearest that are chosen for all groups of a row together."""

from __future__ import annotations

import pytest
import torch

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.modifiers.base import LinearLayer
from octavo.compress.modifiers.quantization import QuantizationModifier
from octavo.compress.observers import choose_grid, uses_hessian
from octavo.compress.rounding import Grid, dequantize, quantize
from octavo.compress.scale_descent import _RATIOS, descend
from octavo.compress.statistics import InputStatistics

FOUR, THREE = WeightScheme(4, group_size=32), WeightScheme(3, group_size=32)


def layer(rows: int = 24, columns: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and inputs [tokens, K] that go together: few causes behind them."""
    torch.manual_seed(0)
    causes = torch.randn(400, 12) @ torch.randn(12, columns)
    return torch.randn(rows, columns), causes + 0.5 * torch.randn(400, columns)


def error(weight: torch.Tensor, grid: Grid, hessian: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """Of the outputs, squared, a row [N]."""
    difference = dequantize(quantize(weight, grid, scheme), grid, scheme) - weight
    return torch.linalg.vecdot(difference @ hessian, difference)


@pytest.mark.parametrize("scheme", [FOUR, THREE], ids=["4 bits", "3 bits"])
def test_errors_of_groups_cancel(scheme: WeightScheme) -> None:
    weight, inputs = layer()
    hessian = inputs.t() @ inputs
    alone = choose_grid(weight, hessian.diagonal(), scheme, "imatrix_signed", torch.bfloat16)
    together = choose_grid(weight, hessian, scheme, "hessian_signed", torch.bfloat16)
    assert torch.equal(together.scale.bfloat16().float(), together.scale)
    assert error(weight, together, hessian, scheme).sum() < 0.5 * error(weight, alone, hessian, scheme).sum()


def test_a_single_group_gets_the_best_of_the_scales_tried() -> None:
    weight, inputs = layer(columns=32)
    hessian = inputs.t() @ inputs
    peak = weight.gather(1, weight.abs().argmax(dim=1, keepdim=True)) / -8
    least = torch.full((len(weight),), torch.inf)
    for ratio in _RATIOS:
        for sign in (1, -1):
            least = torch.minimum(least, error(weight, Grid(peak * sign * ratio), hessian, FOUR))
    found = error(weight, descend(weight, hessian, FOUR, torch.float32), hessian, FOUR)
    torch.testing.assert_close(found, least, rtol=1e-3, atol=1e-4)


def test_inputs_that_are_never_seen_keep_scales_for_their_weights() -> None:
    weight, inputs = layer()
    inputs[:, :32] = 0
    weight[:, 32:64] = 0
    grid = descend(weight, inputs.t() @ inputs, FOUR, torch.bfloat16)
    restored = dequantize(quantize(weight, grid, FOUR), grid, FOUR)
    assert bool(torch.isfinite(grid.scale).all())
    assert float((restored - weight)[:, :32].square().mean()) < 0.02
    assert not restored[:, 32:64].any()


def test_other_schemes_take_the_diagonal() -> None:
    weight, inputs = layer()
    hessian = inputs.t() @ inputs
    for scheme in (WeightScheme(4, group_size=32, symmetric=False), WeightScheme(8, strategy="channel")):
        assert not uses_hessian("hessian_signed", scheme)
        found = choose_grid(weight, hessian, scheme, "hessian_signed", torch.float32)
        assert torch.equal(
            found.scale, choose_grid(weight, hessian.diagonal(), scheme, "imatrix_signed", torch.float32).scale
        )


def test_the_modifier_asks_for_what_its_observer_uses_and_reports_the_error_of_outputs() -> None:
    weight, inputs = layer()
    groups = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}}
    modifier = QuantizationModifier(config_groups=groups, weight_observer="hessian_signed")
    assert "hessian" in modifier.statistics
    assert "hessian" not in QuantizationModifier(scheme="W8A8", weight_observer="hessian_signed").statistics
    seen = InputStatistics(96, modifier.statistics)
    seen.add(inputs)
    (result,) = modifier.quantize([LinearLayer("l", weight, FOUR, torch.bfloat16)], seen)
    assert result.codes is not None and result.grid is not None
    outputs = inputs @ weight.t()
    rounded = inputs @ dequantize(result.codes, result.grid, FOUR).t()
    expected = float((rounded - outputs).square().sum() / outputs.square().sum())
    assert result.error == pytest.approx(expected, rel=1e-3)
