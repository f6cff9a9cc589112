"""Few-row products against the reference on random input: every kind, prologue and epilogue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_weights import quantized
from torch import Tensor

from octavo.ops import reference
from octavo.ops.packed_weight import TorchQuantized
from octavo.ops.triton import linear_w4, runtime
from octavo.ops.triton.runtime import Tile
from octavo.ops.triton.weights import COPIED_ROWS, TritonCodes, TritonDense, TritonWeight

KINDS = [("bf16", None), ("4s", 128), ("4s", None), ("4z", 32), ("4m", 64), ("8s", None), ("8s", 64), ("8m", 32)]


def make(
    kind: str, group: int | None, n: int, k: int, generator: torch.Generator, device: torch.device
) -> tuple[TritonWeight, Tensor]:
    """A weight in the kernels' layout, and what it stands for in float32."""
    if kind == "bf16":
        weight = (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()
        return TritonDense(weight, device), weight.float().to(device)
    packed = quantized(n, k, kind, group, generator)
    plain = TorchQuantized(packed, torch.bfloat16, torch.device("cpu")).rows(torch.arange(n), torch.float32)
    return TritonCodes(packed, device), plain.to(device)


def expected(x: Tensor, weight: Tensor, bias: Tensor | None = None, **parts: Any) -> Tensor:
    """What `few_rows` fuses, in float32 one after another."""
    y = x.float()
    if parts.get("norm") is not None:
        y = reference.rms_norm(y, parts["norm"], parts["eps"])
    y = F.linear(y, weight, None if bias is None else bias.float())
    if parts.get("gate") is not None:
        y = (reference.silu_mul if parts["gate"] == "silu" else reference.gelu_tanh_mul)(y)
    return y if parts.get("residual") is None else y + parts["residual"].float()


def assert_close(actual: Tensor, wanted: Tensor, roundings: int = 1) -> None:
    error = (actual.float() - wanted).norm() / wanted.norm()
    limit = 6e-3 if runtime.is_native() else 1.2e-2  # the interpreter cuts bf16 off instead of rounding
    assert error < limit * roundings, float(error)


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("tile", [Tile(1, 4, 128, 1, 4, 1), Tile(16, 32, 64, 1, 4, 2), Tile(16, 16, 64, 2, 4, 2)])
def test_plain_product(kind: str, group: int | None, tile: Tile, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, plain = make(kind, group, 50, 384, generator, device)
    rows = 1 if tile.rows == 1 else 5
    x = torch.randn(rows, 384, generator=generator).bfloat16().to(device)
    bias = torch.randn(50, generator=generator).bfloat16().to(device)
    actual = weight.few(x, bias, torch.float32, tile=tile)
    assert actual.dtype == torch.float32
    assert_close(actual, expected(x, plain, bias))
    assert not runtime.counters(device).any()


@pytest.mark.parametrize(("kind", "group"), [("bf16", None), ("4s", 32), ("4m", 32), ("8s", 64)])
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(
    "tile",
    [Tile(1, 2, 64, 1, 4, 1), Tile(16, 16, 64, 1, 4, 2), Tile(16, 16, 32, 3, 4, 2), Tile(0, 0, 0, 0, 0, 0)],
    ids=["one row", "whole", "split", "cuBLAS"],
)
def test_norm_gate_bias_and_residual(
    kind: str, group: int | None, gate: str | None, tile: Tile, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, plain = make(kind, group, 40, 192, generator, device)
    rows = 1 if tile.rows == 1 else 18

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    x, bias, residual = 3 * random(rows, 192), random(40), random(rows, 20 if gate else 40)
    parts = {"norm": random(192), "eps": 1e-5, "gate": gate, "residual": residual}
    kept = residual.clone()
    actual = weight.few(x, bias, tile=tile, **parts)
    assert actual.dtype == torch.bfloat16
    # single steps round the normed rows, the weight, the product and what it is multiplied to, to bf16
    assert_close(actual, expected(x, plain, bias, **parts), 3 if tile.split == 0 else 1)
    assert torch.equal(residual, kept)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "group"), [("bf16", None), ("4s", 64), ("8s", 64)])
@pytest.mark.parametrize("tile", [Tile(1, 4, 64, 1, 4, 1), Tile(16, 16, 64, 2, 4, 2)])
def test_early_products_ask_for_the_whole_weight(
    kind: str, group: int | None, tile: Tile, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(7)
    weight, plain = make(kind, group, 50, 1088, generator, device)
    x = torch.randn(min(tile.rows, 5), 1088, generator=generator).bfloat16().to(device)
    monkeypatch.setattr(runtime, "dependent_bytes", lambda kind, m: 1 << 40)
    wanted = expected(x, plain)
    for limit in (0, 1 << 40):
        monkeypatch.setattr(runtime, "prefetch_bytes", lambda kind, m, limit=limit: limit)
        assert_close(weight.few(x, tile=tile), wanted)


@pytest.mark.parametrize("kind", ["bf16", "4s", "8s"])
@pytest.mark.parametrize("rows", [0, 1, 2, 17, 70, 300])
def test_linear_takes_any_number_of_rows(kind: str, rows: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, plain = make(kind, None if kind == "bf16" else 32, 48, 96, generator, device)
    x = torch.randn(rows, 96, generator=generator).bfloat16().to(device)
    for dtype in (torch.bfloat16, torch.float32):
        actual = weight.linear(x, None, dtype)
        assert actual.dtype == dtype and actual.shape == (rows, 48)
        if rows:
            assert_close(actual, expected(x, plain))
    with pytest.raises(ValueError, match="95 columns"):
        weight.linear(x[:, :95], None, torch.bfloat16)


@pytest.mark.parametrize("kind", ["4s", "8m"])
def test_many_rows_are_multiplied_with_a_copy_if_there_is_one(kind: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, plain = make(kind, 32, 48, 96, generator, device)
    x = torch.randn(COPIED_ROWS + 1, 96, generator=generator).bfloat16().to(device)
    few, before = weight.linear(x[:5], None, torch.float32), weight.num_bytes
    copy_bytes = weight.dense_copy_bytes
    weight.keep_dense_copy()
    assert weight.num_bytes == before + copy_bytes == before + 2 * 48 * 96 and weight.dense_copy_bytes == 0
    assert torch.equal(weight.linear(x[:5], None, torch.float32), few)
    weight.data.zero_()  # now only the copy knows the weight
    assert_close(weight.linear(x, None, torch.float32), expected(x, plain))


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_rows_and_the_whole_weight(kind: str, group: int | None, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    weight, plain = make(kind, group, 70, 256, generator, device)
    ids = torch.tensor([[3, 69], [0, 3]], device=device)
    assert torch.equal(weight.rows(ids, torch.float32), plain[ids])
    if runtime.is_native():
        assert torch.equal(weight.dense(), plain.bfloat16())
    assert_close(weight.dense(), plain)
    assert weight.num_bytes < plain.nbytes


def test_words_hold_the_codes_of_padded_units() -> None:
    codes = torch.randint(0, 256, (3, 96), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    words = linear_w4.pack_codes(codes)
    assert words.shape == (3, 32) and words.dtype == torch.int32
    columns = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    assert torch.equal(linear_w4.unpack_codes(words, 192), columns)
    assert int(words[2, 16 + 5] >> 12 & 15) == int(columns[2, 128 + 3 * 16 + 5])


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**12])
def test_one_row_of_codes_takes_small_and_large_inputs(factor: float, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(6)
    weight, plain = make("4s", 64, 24, 256, generator, device)
    x = (factor * torch.randn(1, 256, generator=generator)).bfloat16().to(device)
    actual = weight.few(x, None, torch.float32, tile=Tile(1, 4, 32, 1, 1, 1))
    error = (actual - F.linear(x.float(), plain)).norm() / F.linear(x.float(), plain).norm()
    assert error < 1e-5


def test_a_table_holds_tiles_and_early_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    tile = {"kind": "int4", "n": 64, "k": 128, "m": 16, "tile": [16, 64, 128, 2, 4, 3]}
    early = {"kind": "int4", "m": 16, "dependent_bytes": 7}
    path.write_text(json.dumps([tile, early, {**early, "m": 1, "prefetch_bytes": 5}]))
    assert runtime.read_tiles(path) == {("int4", 64, 128, 16): Tile(16, 64, 128, 2, 4, 3)}
    monkeypatch.setattr(runtime, "tuned_early", lambda: runtime.read_early(path))
    assert runtime.dependent_bytes("int4", 9) == runtime.dependent_bytes("int4", 1) == 7
    assert runtime.prefetch_bytes("int4", 1) == 5 < runtime.prefetch_bytes("int4", 9)
    assert runtime.dependent_bytes("int4", 40) == runtime.dependent_bytes("bf16", 1) > 7
    assert runtime.prefetch_bytes("bf16", 1) == 0
