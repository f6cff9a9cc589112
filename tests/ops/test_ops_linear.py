"""Packed products against float32 products of the dequantized weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_weights import quantized
from torch import Tensor

from octavo import ops
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.errors import UserError
from octavo.ops import reference
from octavo.ops.cpu import library
from octavo.ops.packed_weight import TorchQuantized

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 20, 31, 40, 70)
# Torch's own bfloat16 products round the sums, too.
TOLERANCE = 4e-3 if library.unavailable() is None else 1e-2
needs_kernels = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def check(
    weight: Tensor | QuantizedWeight, expected_weight: Tensor, tolerance: float, generator: torch.Generator
) -> None:
    packed = ops.pack_weight(weight, torch.bfloat16)
    n, k = expected_weight.shape
    assert packed.shape == (n, k)
    bias = torch.randn(n, generator=generator).bfloat16()
    for rows in ROWS:
        x = torch.randn(rows, k, generator=generator).bfloat16()
        expected = x.float() @ expected_weight.T
        y = ops.linear(x, packed, out_dtype=torch.float32)
        assert y.dtype == torch.float32
        assert relative_error(y, expected) < tolerance, rows
        y = ops.linear(x, packed, bias)
        assert y.dtype == torch.bfloat16
        assert relative_error(y, expected + bias.float()) < 8e-3, rows


@pytest.mark.parametrize(("n", "k"), [(64, 64), (576, 576), (100, 96), (33, 160), (17, 1536), (1, 2), (16, 34)])
def test_dense(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n * k)
    weight = torch.randn(n, k, generator=generator).bfloat16()
    # A sum of bfloat16 products in float32 differs by its order only; torch's own sums may round to bfloat16.
    tolerance = 1e-5 if library.unavailable() is None else 6e-3
    check(weight, weight.float(), tolerance, generator)


@pytest.mark.parametrize("kind", ["4s", "8m", "8a"])
def test_columns_in_an_order_of_their_own(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = quantized(48, 128, kind, None if kind == "8a" else 32, generator)
    mixed = replace(weight, order=torch.randperm(128, generator=generator))
    packed = ops.pack_weight(mixed, torch.bfloat16)
    assert packed.num_bytes == ops.pack_weight(weight, torch.bfloat16).num_bytes + 128 * 8
    x = torch.randn(5, 128, generator=generator).bfloat16()
    assert relative_error(ops.linear(x, packed, out_dtype=torch.float32), x.float() @ mixed.dequantize().T) < 1e-2
    assert torch.equal(packed.rows(torch.tensor([7, 0]), torch.float32), mixed.rows(torch.tensor([7, 0])))
    if packed.input_kind is not None:
        codes, scale = reference.quantize_rows(x, packed.input_kind, None)
        got = packed.linear_quantized(codes, scale, None, torch.float32)
        torch.testing.assert_close(got, ops.linear(x, packed, out_dtype=torch.float32))


def test_a_weight_may_begin_at_any_byte_of_a_file() -> None:
    values = torch.randn(33 * 64 + 1, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    within, apart = values[1:].view(33, 64), values[1:].clone().view(33, 64)
    got = [ops.linear(x, ops.pack_weight(weight, torch.bfloat16)) for weight in (within, apart)]
    assert torch.equal(got[0], got[1])


@pytest.mark.parametrize("kind", ["4s", "4z", "4m", "8s", "8m"])
@pytest.mark.parametrize(("n", "k", "group"), [(576, 576, 64), (100, 96, 32), (33, 512, 128), (17, 1536, None)])
def test_groups(n: int, k: int, group: int | None, kind: str) -> None:
    generator = torch.Generator().manual_seed(n * k)
    weight = quantized(n, k, kind, group, generator)
    # From some number of rows on the weights are rounded to bfloat16 (2^-9) before the product.
    check(weight, weight.dequantize(torch.float32), TOLERANCE, generator)


@needs_kernels
@pytest.mark.parametrize("kind", ["dense", "4s", "8a"])
@pytest.mark.parametrize("rows", [513, 545, 1025])
def test_many_rows_are_cut_into_blocks(kind: str, rows: int) -> None:
    """K = 4096 makes blocks of 256 rows; a rest of one row goes with the block before it."""
    generator = torch.Generator().manual_seed(rows)
    weight: Tensor | QuantizedWeight = torch.randn(40, 4096, generator=generator).bfloat16()
    if kind != "dense":
        weight = quantized(40, 4096, kind, None if kind == "8a" else 128, generator)
    packed = ops.pack_weight(weight, torch.bfloat16)
    x = torch.randn(rows, 4096, generator=generator).bfloat16()
    expected = torch.cat([ops.linear(part, packed, out_dtype=torch.float32) for part in x.split(100)])
    assert relative_error(ops.linear(x, packed, out_dtype=torch.float32), expected) < 4e-3
    assert relative_error(ops.linear(x, packed)[-1:], expected[-1:]) < 8e-3


@needs_kernels
@pytest.mark.parametrize("kind", ["4s", "8s"])
def test_few_rows_keep_more_than_bfloat16(kind: str) -> None:
    """Below the threshold codes and bfloat16 scales are exact, and x keeps 16 bits below the largest of its group."""
    generator = torch.Generator().manual_seed(5)
    weight = quantized(96, 256, kind, 32, generator)
    packed = ops.pack_weight(weight, torch.bfloat16)
    x = torch.randn(4, 256, generator=generator).bfloat16()
    expected = x.double() @ weight.dequantize(torch.float32).double().T
    y = ops.linear(x, packed, out_dtype=torch.float32)
    assert relative_error(y, expected.float()) < 6e-5


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_shows_in_its_row_only(value: float) -> None:
    generator = torch.Generator().manual_seed(14)
    for kind in ("4s", "4m", "8s"):
        packed = ops.pack_weight(quantized(40, 64, kind, 32, generator), torch.bfloat16)
        x = torch.randn(3, 64, generator=generator).bfloat16()
        x[1, 7] = value
        y = ops.linear(x, packed, out_dtype=torch.float32)
        assert not y[1].isfinite().any()
        assert y[0].isfinite().all()
        assert y[2].isfinite().all()


def test_a_row_of_tiny_and_of_zero_scales_keeps_its_values() -> None:
    generator = torch.Generator().manual_seed(6)
    weight = quantized(32, 128, "4z", 32, generator)
    for scale in (weight.scale, weight.offset):
        assert scale is not None
        scale[3] *= 1e-6
        scale[4] *= 1e6
        scale[5] = 0
    assert weight.offset is not None
    weight.offset[6] = 3.0
    weight.scale[6] = 0
    x = torch.randn(2, 128, generator=generator).bfloat16()
    y = ops.linear(x, ops.pack_weight(weight, torch.bfloat16), out_dtype=torch.float32)
    expected = x.float() @ weight.dequantize(torch.float32).T
    for row in range(8):
        error = (y[:, row] - expected[:, row]).abs().max()
        assert error <= TOLERANCE * expected[:, row].abs().max(), row


@pytest.mark.parametrize(("n", "k"), [(100, 96), (576, 1536)])
def test_int8_inputs(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = quantized(n, k, "8a", None, generator)
    packed = ops.pack_weight(weight, torch.bfloat16)
    for rows in ROWS:
        x = torch.randn(rows, k, generator=generator).bfloat16()
        codes, scale = reference.quantize_rows(x)
        product = codes.long() @ weight.codes.long().T
        expected = product.float() * scale * weight.scale.float().T
        assert relative_error(ops.linear(x, packed, out_dtype=torch.float32), expected) < 1e-6
        assert relative_error(ops.linear(x, packed), expected) < 4e-3


def test_int8_inputs_of_zero_and_of_one_outlier() -> None:
    generator = torch.Generator().manual_seed(8)
    weight = quantized(48, 64, "8a", None, generator)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[1, 5] = -1e30
    y = ops.linear(x, ops.pack_weight(weight, torch.bfloat16), out_dtype=torch.float32)
    assert torch.equal(y[0], torch.zeros(48))
    torch.testing.assert_close(y[1], -1e30 * weight.dequantize(torch.float32)[:, 5], rtol=1e-2, atol=0)


def test_int8_inputs_with_grouped_weights_take_the_torch_layout() -> None:
    generator = torch.Generator().manual_seed(9)
    grouped = quantized(32, 64, "8s", 32, generator)
    scheme = WeightScheme(8, "int", True, "group", 32, ActivationScheme())
    weight = QuantizedWeight(scheme, grouped.shape, grouped.codes, grouped.scale)
    packed = ops.pack_weight(weight, torch.bfloat16)
    assert isinstance(packed, TorchQuantized)
    x = torch.randn(3, 64, generator=generator).bfloat16()
    codes, scale = reference.quantize_rows(x)
    expected = (codes.float() * scale) @ weight.dequantize(torch.float32).T
    assert relative_error(ops.linear(x, packed, out_dtype=torch.float32), expected) < 1e-5


@pytest.mark.parametrize("kind", ["dense", "4s", "4m", "8s", "8m", "8a"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(10)
    if kind == "dense":
        weight: Tensor | QuantizedWeight = torch.randn(50, 64, generator=generator).bfloat16()
        expected = weight
    else:
        weight = quantized(50, 64, kind, None if kind == "8a" else 32, generator)
        expected = weight.dequantize(torch.float32)
    packed = ops.pack_weight(weight, torch.bfloat16)
    ids = torch.tensor([[0, 49, 17], [16, 15, 0]])
    rows = packed.rows(ids, dtype)
    assert rows.dtype == dtype
    assert rows.shape == (2, 3, 64)
    torch.testing.assert_close(rows.float(), expected[ids].float(), rtol=1e-2 if kind[1] == "m" else 4e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "4m", "8s", "8a"])
def test_float32_goes_through_torch(kind: str) -> None:
    generator = torch.Generator().manual_seed(11)
    weight: Tensor | QuantizedWeight
    if kind == "dense":
        weight = torch.randn(20, 64, generator=generator)
        expected_weight = weight
    else:
        weight = quantized(20, 64, kind, None if kind == "8a" else 32, generator)
        expected_weight = weight.dequantize(torch.float32)
    x = torch.randn(3, 64, generator=generator)
    bias = torch.randn(20, generator=generator)
    y = ops.linear(x, ops.pack_weight(weight, torch.float32), bias)
    if kind == "8a":
        codes, scale = reference.quantize_rows(x)
        x = codes.float() * scale
    torch.testing.assert_close(y, x @ expected_weight.T + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [None, "fp8"])
def test_float8_weights(kind: str | None) -> None:
    generator = torch.Generator().manual_seed(16)
    activations = None if kind is None else ActivationScheme(type="float")
    scheme = WeightScheme(8, "float", True, "channel", None, activations)
    codes = (torch.randn(33, 64, generator=generator) * 100).to(torch.float8_e4m3fn)
    weight = QuantizedWeight(scheme, (33, 64), codes, torch.rand(33, 1, generator=generator).bfloat16())
    packed = ops.pack_weight(weight, torch.float32)
    assert packed.input_kind == kind
    x = torch.randn(5, 64, generator=generator)
    bias = torch.randn(33, generator=generator)
    rounded = x
    if kind == "fp8":
        rows, scale = reference.quantize_rows(x, "fp8")
        rounded = rows.float() * scale
        assert not torch.equal(rounded, x)
        residual = torch.randn(5, 33, generator=generator)
        total = residual + ops.linear(x, packed, bias)
        assert packed.linear_quantized(rows, scale, bias, torch.float32, residual) is residual
        torch.testing.assert_close(residual, total, rtol=1e-5, atol=1e-4)
    expected = rounded @ weight.dequantize(torch.float32).T + bias
    torch.testing.assert_close(ops.linear(x, packed, bias), expected, rtol=1e-5, atol=1e-3)
    ids = torch.tensor([[0, 32], [7, 7]])
    assert torch.equal(packed.rows(ids, torch.float32), weight.dequantize(torch.float32)[ids])


def test_rounding_of_rows_to_eight_bits() -> None:
    """Against the numbers by hand; for FP8, `test_rounding_of_rows_equals_the_package` asks compressed-tensors, too."""
    x = torch.tensor([[127.0, -127, 0.5, 1.5, -2.5], [0, 0, 0, 0, 0]])
    codes, scale = reference.quantize_rows(x)
    assert codes.tolist() == [[127, -127, 0, 2, -2], [0] * 5]
    assert scale[0].item() == 1
    codes, scale = reference.quantize_rows(torch.tensor([[448.0, -447, 17, 19, 0.001], [0, 0, 0, 0, 0]]), "fp8")
    assert codes.float().tolist() == [[448, -448, 16, 20, 2**-9], [0] * 5]
    assert scale[0].item() == 1


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_static_scale_rounds_every_row(kind: str) -> None:
    generator = torch.Generator().manual_seed(18)
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    codes = (torch.randn(16, 64, generator=generator) * 50).to(dtype)
    of = "int" if kind == "int8" else "float"
    static = ActivationScheme(type=of, strategy="tensor", dynamic=False)
    scheme = WeightScheme(8, of, True, "channel", None, static)
    weight = QuantizedWeight(scheme, (16, 64), codes, torch.rand(16, 1, generator=generator), input_scale=0.25)
    packed = ops.pack_weight(weight, torch.bfloat16)
    assert packed.input_scale == 0.25
    x = torch.randn(5, 64, generator=generator).bfloat16()
    x[0, :2] = torch.tensor([500.0, -500.0])  # beyond the largest code
    largest = (127, -128) if kind == "int8" else (448, -448)
    rounded = (x.float() * 4).clamp(largest[1], largest[0])
    rounded = rounded.round() if kind == "int8" else rounded.to(dtype).float()
    expected = rounded @ (codes.float() * weight.scale).T * 0.25
    torch.testing.assert_close(ops.linear(x, packed, None, torch.float32), expected, rtol=1e-5, atol=1e-3)


def test_rounding_of_rows_equals_the_package() -> None:
    """For FP8: int8 follows vLLM's kernels, whose largest code is 127 where the package takes 127.5."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

    args = quantization.QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    x = torch.randn(2, 40, 96, generator=torch.Generator().manual_seed(17))
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    expected = fake_quantize(x, scale, zero, args)
    codes, ours = reference.quantize_rows(x, "fp8")
    assert torch.equal(ours, scale)
    assert torch.equal(codes.float() * ours, expected)


def test_unserved_schemes_are_refused_by_name() -> None:
    generator = torch.Generator().manual_seed(12)
    weight = quantized(16, 32, "8s", 32, generator)
    four_bits = ActivationScheme(num_bits=4)
    weight.scheme = WeightScheme(8, "int", True, "group", 32, four_bits)
    with pytest.raises(UserError, match=r"activations with .* have no kernel"):
        ops.pack_weight(weight, torch.bfloat16)
    weight.scheme = WeightScheme(8, "float", True, "channel", None, ActivationScheme())
    with pytest.raises(UserError, match="have no kernel for float weights"):
        ops.pack_weight(weight, torch.bfloat16)
    weight.scheme = WeightScheme(6, "float", True, "channel")
    with pytest.raises(UserError, match="type float with 6 bits"):
        ops.pack_weight(weight, torch.bfloat16)


def test_describe_names_layout_shape_and_size() -> None:
    packed = ops.pack_weight(torch.zeros(1024, 512), torch.float32)
    assert packed.describe() == "torch dense [1024, 512], 2.0 MiB"
    assert packed.num_bytes == 1024 * 512 * 4


@needs_kernels
def test_packed_sizes() -> None:
    generator = torch.Generator().manual_seed(13)
    n, k = 64, 256
    four = ops.pack_weight(quantized(n, k, "4s", 32, generator), torch.bfloat16)
    assert four.num_bytes == n * k // 2 + n * k // 32 * 2 + n * 4  # codes, fp16 scales, a factor a row
    with_offset = ops.pack_weight(quantized(n, k, "4m", 32, generator), torch.bfloat16)
    assert with_offset.num_bytes == four.num_bytes + n * k // 32 * 2


def test_a_wrong_width_is_an_error_and_other_dtypes_are_converted() -> None:
    generator = torch.Generator().manual_seed(15)
    weight = torch.randn(20, 64, generator=generator).bfloat16()
    packed = ops.pack_weight(weight, torch.bfloat16)
    with pytest.raises((ValueError, RuntimeError)):
        ops.linear(torch.zeros(2, 32, dtype=torch.bfloat16), packed)
    x = torch.randn(3, 128, generator=generator).bfloat16()[:, ::2]
    assert relative_error(ops.linear(x, packed), x.float() @ weight.float().T) < 8e-3
    assert ops.linear(x, packed, out_dtype=torch.float16).dtype == torch.float16


def test_default_dtype() -> None:
    assert ops.default_dtype("cuda") == torch.bfloat16
    with_products = library.level() > 0 or library.torch_has_bfloat16_products()
    assert ops.default_dtype("cpu") == (torch.bfloat16 if with_products else torch.float32)
