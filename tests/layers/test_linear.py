"""Merged linear layers, quantization on load, and the tied embedding, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from octavo.checkpoint.quantized import QuantizedWeight
from octavo.errors import UserError
from octavo.layers.embedding import Embedding, embedding_and_output
from octavo.layers.layer import weight_bytes
from octavo.layers.linear import Linear, merge_parts
from octavo.layers.quantize import check_quantization, quantize_weight


def quantized(rows: int, columns: int, kind: str, seed: int = 0) -> QuantizedWeight:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    result = quantize_weight(weight, kind)
    assert isinstance(result, QuantizedWeight)
    return result


def test_merged_projections_equal_separate_ones() -> None:
    parts = [torch.randn(rows, 64) for rows in (48, 16, 16)]
    bias = torch.randn(80)
    x = torch.randn(5, 64)
    layer = Linear(parts, bias, torch.float32)
    assert len(layer.packed) == 1
    torch.testing.assert_close(layer(x), torch.cat([F.linear(x, part) for part in parts], dim=1) + bias)


def test_leading_dimensions_are_kept() -> None:
    weight, x = torch.randn(8, 64), torch.randn(2, 3, 64)
    torch.testing.assert_close(Linear([weight], None, torch.float32)(x), F.linear(x, weight))


@pytest.mark.parametrize(
    "kinds",
    [
        ("fp8", "fp8", "fp8"),
        ("fp8", "int8", "fp8"),
        ("int8", "int8", "int8"),
        ("w4a16",) * 3,
        ("w4a16", "int8", "w4a16"),
    ],
)
def test_quantized_parts_are_merged_when_their_schemes_agree(kinds: tuple[str, ...]) -> None:
    parts = [quantized(rows, 128, kind, rows) for rows, kind in zip((64, 32, 16), kinds, strict=True)]
    bias = torch.randn(112)
    layer = Linear(parts, bias, torch.float32)
    assert len(layer.packed) == (1 if len(set(kinds)) == 1 else 3)
    x = torch.randn(7, 128)
    expected = torch.cat([F.linear(x, part.dequantize(torch.float32)) for part in parts], dim=1) + bias
    error = (layer(x) - expected).abs().max() / expected.abs().max()
    assert error < (0.06 if "fp8" in kinds else 0.02)


def test_dense_and_quantized_parts_stay_apart() -> None:
    parts = [quantized(32, 64, "int8"), torch.randn(16, 64)]
    assert merge_parts(parts) == parts


def test_int8_rounding_error_is_half_a_step() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    result = quantize_weight(weight, "int8")
    assert isinstance(result, QuantizedWeight)
    error = (result.dequantize() - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 127 * 0.5 + 1e-6).all()
    assert error.max() > 0


@pytest.mark.parametrize("columns", [128, 192])
def test_of_4_bits_no_level_is_lost(columns: int) -> None:
    """The largest weight of a group is exact, others err by half a step, or by one where they nearly mirror it."""
    weight = torch.randn(40, columns, generator=torch.Generator().manual_seed(1))
    result = quantize_weight(weight, "w4a16")
    assert isinstance(result, QuantizedWeight)
    grouped, error = (w.unflatten(1, (-1, result.group_size)) for w in (weight, result.dequantize() - weight))
    place = grouped.abs().argmax(2, keepdim=True)
    assert error.gather(2, place).abs().max() < 1e-6
    step = grouped.gather(2, place) / 8  # with the sign of the largest
    mirrors = grouped / step < -7.5
    assert (error.abs() <= step.abs() * torch.where(mirrors, 1.0, 0.5) + 1e-6).all()
    coarse = step.abs() * 8 / 7
    assert error.square().mean() < 0.85 * ((grouped / coarse).round() * coarse - grouped).square().mean()


def test_fp8_rounds_each_weight_to_four_bits_of_mantissa() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    result = quantize_weight(weight, "fp8")
    assert isinstance(result, QuantizedWeight)
    assert result.codes.dtype == torch.float8_e4m3fn
    assert (result.codes.float().abs().amax(1) == 448).all()
    smallest = result.scale * 2.0**-9  # E4M3's smallest number
    error = (result.dequantize() - weight).abs()
    assert (error <= torch.maximum(weight.abs() * 2.0**-4, smallest / 2) * 1.0001).all()
    assert torch.equal(quantize_weight(torch.zeros(4, 32), "fp8").dequantize(), torch.zeros(4, 32))


def test_rows_that_no_group_divides_stay_plain() -> None:
    weight = torch.randn(8, 40)
    assert quantize_weight(weight, "w4a16") is weight


def test_zero_rows_stay_zero() -> None:
    weight = torch.zeros(4, 128)
    assert torch.equal(quantize_weight(weight, "w4a16").dequantize(), weight)


def test_quantization_names_are_checked() -> None:
    check_quantization(None)
    check_quantization("int8")
    check_quantization("fp8")
    with pytest.raises(UserError, match=r"nf4.*int8, fp8, w4a16"):
        check_quantization("nf4")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [None, "int8"])
def test_embedding_and_output(tied: bool, kind: str | None) -> None:
    weight = torch.randn(50, 64)
    given = quantize_weight(weight, kind) if kind else weight
    dense = given.dequantize() if isinstance(given, QuantizedWeight) else given
    other = torch.randn(50, 64)
    embedding, output = embedding_and_output(given, None if tied else other, torch.float32)
    ids, hidden = torch.tensor([3, 49, 0, 3]), torch.randn(2, 64)
    torch.testing.assert_close(embedding(ids), dense[ids], atol=1e-5, rtol=1e-4)
    expected = F.linear(hidden, dense if tied else other)
    logits = output(hidden)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.02 * expected.abs().max()
    assert (weight_bytes([embedding, output]) == weight_bytes(embedding)) == tied


def test_embedding_shape_is_told() -> None:
    embedding = Embedding(torch.zeros(7, 3), torch.bfloat16)
    assert (embedding.num_embeddings, embedding.embedding_dim) == (7, 3)
    assert embedding(torch.tensor([1])).dtype == torch.bfloat16
