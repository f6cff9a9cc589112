"""The scales of integer grids: compiled against torch, and against what every group could have at best."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import integer_grid
from octavo.ops.cpu import library
from octavo.ops.integer_grid import Integers, fit_scales, pick_scales, rounding_difference

INT3, INT4, INT8 = Integers(-4, 3), Integers(-8, 7), Integers(-128, 127)
compiled = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))


def weighed_error(values: torch.Tensor, importance: torch.Tensor | None, scale: torch.Tensor, integers: Integers):
    steps = torch.where(scale == 0, torch.ones_like(scale), scale).unsqueeze(-1)
    squares = ((values / steps).clamp(*integers).round() * steps - values).square()
    return (squares if importance is None else squares * importance).sum(dim=-1)


def random_case(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight[1] *= 1e-3
    weight[2, : columns // 2] = 0
    weight[3] = 0
    weight[4, 0] = -25.0
    return weight, torch.rand(columns, generator=generator).exp()


@compiled
@pytest.mark.parametrize("integers", [INT3, INT4, INT8])
@pytest.mark.parametrize("width", [1, 16, 64, 100, 577])
@pytest.mark.parametrize("is_weighed", [False, True])
def test_compiled_scales_are_as_good_as_those_of_torch(integers, width, is_weighed):
    """Two starts may tie up to the order of sums, so errors are compared, and most scales."""
    values, importance = random_case(300, width, seed=width)
    weights = importance if is_weighed else None
    expected = integer_grid._fit_reference(values, weights, integers)
    found = integer_grid._fit_cpu(values, weights, integers)
    assert found[3] == expected[3] == 0
    assert torch.isclose(found, expected, rtol=1e-4).float().mean() > 0.98
    errors = [weighed_error(values, weights, scale, integers) for scale in (found, expected)]
    torch.testing.assert_close(*errors, rtol=2e-3, atol=1e-9)


@compiled
@pytest.mark.parametrize(("columns", "width"), [(128, 64), (100, 32), (96, 96), (40, 64)])
@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize("is_weighed", [False, True])
@pytest.mark.parametrize("cut", [1.0, 0.7])
def test_the_compiled_difference_is_that_of_torch(columns, width, with_factors, is_weighed, cut):
    weight, importance = random_case(200, columns, seed=columns)
    importance = importance if is_weighed else None
    factors = torch.rand(columns, generator=torch.Generator().manual_seed(1)).exp() if with_factors else None
    arguments = (weight, importance, width, INT4, factors, cut)
    found, expected = integer_grid._difference_cpu(*arguments), integer_grid._difference_reference(*arguments)
    ties = cut < 1 and not is_weighed  # a group whose largest values of both signs are cut has two scales as good
    same = torch.isclose(found, expected, rtol=1e-3, atol=1e-5).float().mean()
    assert same > (0.9 if ties else 0.98)  # else ties and halves
    size = expected.square().sum()
    assert float((found.square().sum() - size).abs() / size) < (2e-2 if ties else 1e-3)


def test_the_scale_beats_those_that_span_the_values():
    """With either sign of the largest value on the lowest integer, and halfway beyond the highest."""
    values, importance = random_case(500, 64, seed=3)
    fitted = weighed_error(values, importance, fit_scales(values, importance, INT4), INT4)
    most = values.abs().amax(dim=-1)
    for scale in (most / 7.5, most / 8, -most / 8):
        assert float(fitted.sum()) < float(weighed_error(values, importance, scale, INT4).sum())


def test_the_difference_is_that_of_the_weight_as_it_will_be_stored():
    weight, importance = random_case(64, 128, seed=5)
    factors = torch.linspace(0.5, 2, 128)
    difference = rounding_difference(weight, importance, 64, INT4, factors)
    scaled = ((weight + difference) * factors).view(64, 2, 64)
    scale = torch.stack([
        fit_scales((weight * factors)[:, 64 * g : 64 * g + 64], (importance / factors**2)[64 * g : 64 * g + 64], INT4)
        for g in range(2)
    ], dim=1)  # fmt: skip
    alive = scale.ne(0)
    levels = scaled[alive] / scale[alive].unsqueeze(-1)
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)
    assert levels.round().min() >= -8 and levels.round().max() <= 7


@compiled
@pytest.mark.parametrize("width", [16, 40, 64, 128])
@pytest.mark.parametrize("count", [1, 6, 40])
def test_the_compiled_pick_is_as_good_as_that_of_torch(width, count):
    values, _ = random_case(100, width, seed=width)
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(3 * width, width, generator=generator)
    corner, wanted = inputs.t() @ inputs, torch.randn(100, width, generator=generator)
    scales = values.abs().amax(dim=1, keepdim=True).clamp_min(1e-3) / 8 * torch.linspace(0.4, 1.1, count)
    found = integer_grid._pick_cpu(values, wanted, corner, scales, INT4)
    expected = integer_grid._pick_reference(values, wanted, corner, scales, INT4)
    assert (found == expected).float().mean() > 0.97  # else a tie, up to the order of sums

    def error(scale: torch.Tensor) -> torch.Tensor:
        levels = (values / scale.unsqueeze(1)).clamp(*INT4).round() * scale.unsqueeze(1)
        return ((levels @ corner - 2 * wanted) * levels).sum(dim=1)

    torch.testing.assert_close(error(found), error(expected), rtol=1e-3, atol=1e-3)
    assert bool((error(pick_scales(values, wanted, corner, scales, INT4)) <= error(scales[:, 0]) + 1e-3).all())
