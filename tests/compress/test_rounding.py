"""Rounding and observers against compressed-tensors and against exhaustive search."""

from __future__ import annotations

import pytest
import torch

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.observers import OBSERVERS, choose_scales, imatrix_signed, minmax, mse, observer
from octavo.compress.rounding import code_range, dequantize, quantize, usable_scale
from octavo.errors import UserError


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (8, None)])
def test_rtn_rounds_as_compressed_tensors_does(bits: int, group: int | None) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as oracle
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(bits)
    weight = torch.randn(24, 96)
    scheme = WeightScheme(bits, strategy="group" if group else "channel", group_size=group)
    args = QuantizationArgs(num_bits=bits, symmetric=True, strategy=scheme.strategy, group_size=group)
    grouped = weight.reshape(24, scheme.num_groups(96), -1)
    expected_scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    scale = choose_scales(weight, None, scheme, "minmax", torch.float32)
    torch.testing.assert_close(scale, expected_scale)
    expected = oracle(weight, expected_scale, zero, args, dtype=torch.int8)
    assert torch.equal(quantize(weight, expected_scale, bits), expected)


def test_dequantize_inverts_codes_and_ranges_hold() -> None:
    assert code_range(4) == (-8, 7)
    assert code_range(8) == (-128, 127)
    codes = torch.randint(-8, 8, (5, 64), dtype=torch.int8)
    scale = torch.rand(5, 2) + 0.1
    assert torch.equal(quantize(dequantize(codes, scale), scale, 4), codes)
    assert dequantize(codes, -scale).equal(-dequantize(codes, scale))


def test_scales_are_exact_in_the_stored_dtype_and_never_zero() -> None:
    scale = usable_scale(torch.tensor([0.0, 1 / 3]), torch.bfloat16)
    assert scale[0] > 0
    assert torch.equal(scale, scale.bfloat16().float())
    zeros = choose_scales(
        torch.zeros(3, 64), torch.ones(64), WeightScheme(4, group_size=32), "imatrix_signed", torch.bfloat16
    )
    assert torch.isfinite(zeros).all()
    assert not quantize(torch.zeros(3, 64), zeros, 4).any()


def _error(weight: torch.Tensor, importance: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rounded = dequantize(quantize(weight, scale[:, None], 4), scale[:, None])
    return ((rounded - weight).square() * importance).sum(dim=1)


def test_signed_scales_come_close_to_an_exhaustive_search() -> None:
    torch.manual_seed(0)
    weight, importance = torch.randn(40, 32), torch.rand(32) + 0.05
    found = _error(weight, importance, imatrix_signed(weight, importance, 4))
    peak = weight.abs().amax(dim=1)
    best = torch.full((40,), torch.inf)
    for step in range(1, 400):
        for sign in (-1, 1):
            best = torch.minimum(best, _error(weight, importance, sign * peak / 7 * step / 300))
    assert float((found / best).mean()) < 1.06
    assert float((found / _error(weight, importance, minmax(weight, None, 4))).mean()) < 0.9


def _power(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rounded = dequantize(quantize(weight, scale[:, None], 4), scale[:, None])
    return (rounded - weight).abs().pow(2.4).sum(dim=1)


def test_mse_is_never_worse_than_minmax_and_importance_matters() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 64)
    assert bool((_power(weight, mse(weight, None, 4)) <= _power(weight, minmax(weight, None, 4)) + 1e-6).all())
    importance = torch.ones(64)
    importance[:8] = 100
    for name in ("imatrix_mse", "imatrix_signed"):
        weighed, plain = OBSERVERS[name](weight, importance, 4), OBSERVERS[name](weight, None, 4)
        assert _error(weight, importance, weighed).sum() < _error(weight, importance, plain).sum()


def test_unknown_observer_names_the_known() -> None:
    with pytest.raises(UserError, match="imatrix_signed"):
        observer("median")
