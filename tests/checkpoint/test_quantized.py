"""The in-memory layout against its definition."""

from __future__ import annotations

import pytest
import torch

from octavo.checkpoint.quantized import QuantizedWeight, pack_nibbles, unpack_nibbles
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.errors import CheckpointError, UnsupportedModelError

SCHEMES = [
    WeightScheme(4, group_size=16),
    WeightScheme(4, symmetric=False, group_size=8),
    WeightScheme(4, strategy="channel"),
    WeightScheme(8, group_size=32),
    WeightScheme(8, symmetric=False, strategy="channel"),
    WeightScheme(8, strategy="channel", activations=ActivationScheme()),
]


def random_weight(scheme: WeightScheme, rows: int = 6, columns: int = 64, seed: int = 0) -> QuantizedWeight:
    torch.manual_seed(seed)
    groups = (rows, scheme.num_groups(columns))
    scale = torch.rand(groups) + 0.1
    if scheme.num_bits == 4:
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        offset = -8 * scale if scheme.symmetric else torch.randn(groups)
    else:
        codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        offset = None if scheme.symmetric else torch.randn(groups)
    return QuantizedWeight(scheme, (rows, columns), codes, scale, offset)


def by_definition(weight: QuantizedWeight) -> torch.Tensor:
    """W[n, k] = scale[n, g] * q[n, k] + offset[n, g], element by element."""
    rows, columns = weight.shape
    result = torch.empty(rows, columns)
    for n in range(rows):
        for k in range(columns):
            g = k // weight.group_size
            if weight.scheme.num_bits == 4:
                byte = int(weight.codes[n, k // 2])
                code = byte & 15 if k % 2 == 0 else byte >> 4
            else:
                code = int(weight.codes[n, k])
            offset = 0.0 if weight.offset is None else float(weight.offset[n, g])
            result[n, k] = float(weight.scale[n, g]) * code + offset
    return result


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_dequantize_is_the_definition(scheme: WeightScheme) -> None:
    weight = random_weight(scheme)
    torch.testing.assert_close(weight.dequantize(), by_definition(weight), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rows_and_selection_are_rows_of_the_dense_weight(scheme: WeightScheme) -> None:
    weight = random_weight(scheme)
    dense = weight.dequantize()
    index = torch.tensor([[3, 0], [5, 3]])
    assert torch.equal(weight.rows(index, torch.float32), dense[index])
    assert weight.rows(index, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(weight.select_rows(torch.tensor([5, 0, 2])).dequantize(), dense[[5, 0, 2]])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_concat_stacks_rows(scheme: WeightScheme) -> None:
    parts = [random_weight(scheme, rows=rows, seed=rows) for rows in (4, 2, 6)]
    whole = QuantizedWeight.concat(parts)
    assert whole.shape == (12, 64)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_concat_refuses_what_differs() -> None:
    first = random_weight(SCHEMES[0])
    for other in (random_weight(SCHEMES[1]), random_weight(SCHEMES[0], columns=32)):
        with pytest.raises(CheckpointError, match="quantized alike"):
            QuantizedWeight.concat([first, other])
    half = QuantizedWeight(first.scheme, first.shape, first.codes, first.scale.half(), first.scale.half() * -8)
    with pytest.raises(CheckpointError, match="quantized alike"):
        QuantizedWeight.concat([first, half])


def test_nibbles_come_back() -> None:
    codes = torch.randint(0, 16, (5, 22), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)
    assert pack_nibbles(torch.tensor([[1, 2]], dtype=torch.uint8)).tolist() == [[0x21]]


def test_bytes_are_those_of_the_parts() -> None:
    assert random_weight(SCHEMES[0]).num_bytes == 6 * 32 + 2 * 6 * 4 * 4
    assert random_weight(SCHEMES[3]).num_bytes == 6 * 64 + 6 * 2 * 4


def test_a_wrong_part_is_named() -> None:
    good = random_weight(SCHEMES[0])
    with pytest.raises(CheckpointError, match=r"codes is .*uint8.*\(6, 32\)"):
        QuantizedWeight(good.scheme, good.shape, good.codes[:, :-1], good.scale, good.offset)
    with pytest.raises(CheckpointError, match="scale is"):
        QuantizedWeight(good.scheme, good.shape, good.codes, good.scale[:, :1], good.offset)
    with pytest.raises(CheckpointError, match="offset is"):
        QuantizedWeight(good.scheme, good.shape, good.codes, good.scale, good.offset.half())
    with pytest.raises(CheckpointError, match="offset is needed"):
        QuantizedWeight(good.scheme, good.shape, good.codes, good.scale, None)
    with pytest.raises(CheckpointError, match="even"):
        QuantizedWeight(WeightScheme(4, strategy="channel"), (6, 63), good.codes, good.scale, good.offset)
    with pytest.raises(CheckpointError, match="4 or 8"):
        QuantizedWeight(WeightScheme(3, strategy="channel"), good.shape, good.codes, good.scale, good.offset)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_bits": 0},
        {"num_bits": 4, "type": "bfloat"},
        {"num_bits": 4, "strategy": "row"},
        {"num_bits": 4, "strategy": "group"},
        {"num_bits": 4, "strategy": "group", "group_size": -1},
        {"num_bits": 8, "strategy": "channel", "group_size": 32},
    ],
)
def test_a_scheme_that_cannot_be_is_refused(arguments: dict) -> None:
    with pytest.raises(UnsupportedModelError, match="quantization scheme"):
        WeightScheme(**arguments)


def test_a_group_must_divide_the_inputs() -> None:
    with pytest.raises(UnsupportedModelError, match=r"128.*576"):
        WeightScheme(4, group_size=128).num_groups(576)
    with pytest.raises(UnsupportedModelError, match="strategy"):
        ActivationScheme(strategy="channel")
