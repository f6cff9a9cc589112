"""Norms, gated activations and rounding to 8 bits, against the reference and against each other."""

from __future__ import annotations

import pytest
import torch
from exact import exact_casts  # noqa: F401
from torch import Tensor

from octavo.ops import reference
from octavo.ops.triton import elementwise, quantize
from octavo.ops.triton.scaled import Scaled

pytestmark = pytest.mark.usefixtures("exact_casts")

WIDTHS = (64, 576, 1000, 4096, 14336) if torch.cuda.is_available() else (64, 576, 1000)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("int8", "fp8")


def random(rows: int, width: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return (values * torch.arange(1, rows + 1)[:, None]).to(dtype).to(device)


def weight_of(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (1 + 0.1 * random(1, width, torch.float32, device, 9)[0]).to(dtype)


def assert_rounds_like(actual: Tensor, expected: Tensor) -> None:
    """Sums in another order may move a value to the next number of its dtype."""
    tolerance = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}[actual.dtype]
    assert actual.dtype == expected.dtype
    absolute = 1e-6 * float(expected.abs().max())  # the reference's 1 + tanh(z) cancels far below zero
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=absolute)


def assert_same_codes(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert actual[0].dtype == expected[0].dtype
    assert torch.equal(actual[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = random(3, width, dtype, device), random(3, width, dtype, device, 1)
    weight = weight_of(width, dtype, device)
    assert_rounds_like(elementwise.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_rounds_like(elementwise.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


def test_norm_of_heads_of_a_slice_and_into_another_tensor(device: torch.device) -> None:
    x = random(6, 128, torch.bfloat16, device)
    weight = weight_of(64, torch.bfloat16, device)
    heads = x.view(3, 4, 64)
    assert_rounds_like(elementwise.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))
    part = x[:, 64:]
    assert_rounds_like(elementwise.rms_norm(part, weight, 1e-6), reference.rms_norm(part, weight, 1e-6))
    out = torch.empty(6, 64, dtype=torch.float32, device=device)
    assert elementwise.rms_norm(part, weight, 1e-6, out) is out
    assert_rounds_like(out, reference.rms_norm(part.float(), weight, 1e-6))
    assert elementwise.rms_norm(x[:0], weight_of(128, torch.bfloat16, device), 1e-6).shape == (0, 128)


def test_what_is_left_to_the_reference(device: torch.device) -> None:
    x = random(2, 64, torch.bfloat16, device)
    weight = weight_of(64, torch.bfloat16, device)
    strided = torch.empty(2, 128, dtype=torch.bfloat16, device=device)[:, ::2]
    assert elementwise.rms_norm(x, weight, 1e-6, strided) is NotImplemented
    assert elementwise.add_rms_norm(x, strided, weight, 1e-6) is NotImplemented
    wide = torch.empty(1, elementwise.MAX_WIDTH + 1, device="meta")
    assert elementwise.rms_norm(wide, wide[0], 1e-6) is NotImplemented


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [*WIDTHS, 2100])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations(name: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x = random(3, 2 * width, dtype, device)
    assert_rounds_like(getattr(elementwise, name)(x), getattr(reference, name)(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rounding_equals_the_reference(width: int, dtype: torch.dtype, kind: str, device: torch.device) -> None:
    x = random(5, width, dtype, device)
    x[1] = 0
    x[2, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    x[2, 4:] = 0
    assert_same_codes(quantize.quantize_rows(x, kind), reference.quantize_rows(x, kind))
    part = x[:, : width // 2]
    assert_same_codes(quantize.quantize_rows(part, kind), reference.quantize_rows(part, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_fused_rounding_equals_the_separate_operations_in_float32(width: int, kind: str, device: torch.device) -> None:
    x, residual = random(3, width, torch.bfloat16, device), random(3, width, torch.bfloat16, device, 1)
    weight = weight_of(width, torch.bfloat16, device)
    expected = quantize.quantize_rows(elementwise.rms_norm(x.float(), weight, 1e-5), kind)
    assert_same_codes(elementwise.add_rms_norm_quant(x, None, weight, 1e-5, kind), expected)
    other = residual.clone()
    elementwise.add_rms_norm(x, residual, weight, 1e-5)
    expected = quantize.quantize_rows(elementwise.rms_norm(residual.float(), weight, 1e-5), kind)
    assert_same_codes(elementwise.add_rms_norm_quant(x, other, weight, 1e-5, kind), expected)
    assert torch.equal(residual, other)
    wide = random(3, 2 * width, torch.bfloat16, device, 2)
    expected = quantize.quantize_rows(elementwise.silu_mul(wide.float()), kind)
    assert_same_codes(elementwise.gated_quant(wide, "silu", kind), expected)
    expected = quantize.quantize_rows(elementwise.gelu_tanh_mul(wide.float()), kind)
    assert_same_codes(elementwise.gated_quant(wide, "gelu_tanh", kind), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 140])
def test_wide_rows_are_rounded_in_parts_when_there_are_few(rows: int, kind: str, device: torch.device) -> None:
    wide = random(rows, 2 * 2500, torch.bfloat16, device, 2)
    expected = quantize.quantize_rows(elementwise.silu_mul(wide.float()), kind)
    assert_same_codes(elementwise.gated_quant(wide, "silu", kind), expected)


def scaled(values: Tensor, device: torch.device) -> Scaled:
    """Those numbers under random scales of rows and columns."""
    generator = torch.Generator().manual_seed(5)
    row, column = (0.1 + torch.rand(size, generator=generator) for size in ((values.shape[0], 1), (values.shape[1],)))
    return Scaled(values, row.to(device), column.to(device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(3, 576), (3, 2500), (140, 72)])
def test_scales_that_a_product_left_are_applied(rows: int, width: int, kind: str, device: torch.device) -> None:
    x = scaled(random(rows, width, torch.bfloat16, device), device)
    weight, residual = weight_of(width, torch.bfloat16, device), random(rows, width, torch.bfloat16, device, 1)
    whole = x.values.float() * x.column * x.row
    total = (whole + residual.float()).bfloat16()
    expected = quantize.quantize_rows(elementwise.rms_norm(total.float(), weight, 1e-5), kind)
    assert_same_codes(elementwise.add_rms_norm_quant(x, residual, weight, 1e-5, kind), expected)
    assert torch.equal(residual, total)
    expected = quantize.quantize_rows(elementwise.rms_norm(whole, weight, 1e-5), kind)
    assert_same_codes(elementwise.add_rms_norm_quant(x, None, weight, 1e-5, kind), expected)
    wide = scaled(random(rows, 2 * width, torch.bfloat16, device, 2), device)
    exact = wide.values.float() * (wide.column * wide.row)
    for gate in ("silu", "gelu_tanh"):
        expected = quantize.quantize_rows(getattr(elementwise, f"{gate}_mul")(exact), kind)
        assert_same_codes(elementwise.gated_quant(wide, gate, kind), expected)


@pytest.mark.gpu
def test_quotients_are_those_of_a_division(device: torch.device) -> None:
    """Of all bfloat16 magnitudes up to a row's largest, for scales of many sizes."""
    numbers = torch.arange(0, 1 << 15, device=device).to(torch.int16).view(torch.bfloat16).float()
    for largest in (1e-20, 0.3, 1.0, 7.7, 448.0, 3e8):
        row = torch.where(numbers <= largest, numbers, 0)[None].repeat(64, 1)
        row = (row * torch.linspace(1, 2, 64, device=device)[:, None]).contiguous()
        for kind in KINDS:
            assert_same_codes(quantize.quantize_rows(row, kind), reference.quantize_rows(row, kind))
