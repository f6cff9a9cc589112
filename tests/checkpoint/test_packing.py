"""compressed-tensors' packing rule: golden vectors, round trips, and the package itself as the oracle."""

from __future__ import annotations

import pytest
import torch

from octavo.checkpoint.packing import pack_codes, packed_columns, unpack_codes
from octavo.errors import CheckpointError


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


@pytest.mark.parametrize(
    ("bits", "codes", "words"),
    [
        (4, [1], [9]),
        (8, [1, 2], [33409]),
        (4, list(range(-8, 0)), [0x76543210]),
        (4, list(range(8)), [0xFEDCBA98]),
        (8, [-128, -1, 0, 127], [0xFF807F00]),
        (3, [i % 8 - 4 for i in range(32)], [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
    ],
)
def test_golden_vectors(bits: int, codes: list[int], words: list[int]) -> None:
    packed = pack_codes(torch.tensor([codes], dtype=torch.int8), bits)
    assert packed.dtype == torch.int32
    assert packed.tolist() == [[signed(word) for word in words]]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [1, 7, 32, 65, 128])
def test_codes_come_back(bits: int, columns: int) -> None:
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (5, columns), dtype=torch.int8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, packed_columns(columns, bits))
    assert torch.equal(unpack_codes(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_equals_compressed_tensors(bits: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (9, 50), dtype=torch.int8)
    assert torch.equal(pack_codes(codes, bits), helpers.pack_to_int32(codes, bits))
    zero_points = helpers.pack_to_int32(codes, bits, packed_dim=0)
    assert torch.equal(pack_codes(codes.T.contiguous(), bits).T, zero_points)


def test_the_old_layout_without_straddling_is_read() -> None:
    codes = torch.randint(-4, 4, (3, 64), dtype=torch.int8)
    words = torch.zeros(3, 7, dtype=torch.int64)
    for column in range(64):  # ten 3-bit codes a word, two bits empty
        words[:, column // 10] |= (codes[:, column].to(torch.int64) + 4) << (3 * (column % 10))
    packed = words.to(torch.int32)
    assert packed_columns(64, 3) == 6  # so the width tells the two apart
    assert torch.equal(unpack_codes(packed, 3, 64), codes)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"-8 to 7"):
        pack_codes(torch.tensor([[8]], dtype=torch.int8), 4)
    with pytest.raises(CheckpointError, match="5 words"):
        unpack_codes(torch.zeros(2, 5, dtype=torch.int32), 4, 32)
    with pytest.raises(CheckpointError, match="int32"):
        unpack_codes(torch.zeros(2, 4, dtype=torch.uint8), 4, 32)
