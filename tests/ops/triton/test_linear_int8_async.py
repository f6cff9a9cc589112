"""int8 products with tiles in flight: against exact sums on Hopper, compiled for it elsewhere, and who takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
from absent_gpu import run_without_gpu
from eight_bit import operands, relative_error

from octavo.ops.triton import linear_8bit_parts, runtime
from octavo.ops.triton.linear_8bit import ASYNC_TILES, async_tile, bucket, default_tile, linear_8bit, tile_8bit
from octavo.ops.triton.linear_8bit_parts import ASYNC_COLUMNS, has_async, takes_async
from octavo.ops.triton.runtime import Tile

TILES = (async_tile(128, 128, 4, 3), async_tile(64, 256, 4, 4))
TABLE = Path(runtime.__file__).parent / "tuned" / "NVIDIA_H200.json"


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    if not has_async(device):
        pytest.skip("needs a GPU of compute capability 9.0, and the release of Triton that the kernel is written for")
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "shape", [(1, 96, 128), (129, 101, 384), (300, 1000, 256), (70, 4096, 1024), (2200, 4400, 512)]
)
def test_products(shape: tuple[int, int, int], tile: Tile, hopper: torch.device) -> None:
    """Ragged rows and columns, programs of one tile and of several, rings that go round and that do not fill."""
    codes, scale, weight, weight_scale, exact = operands(*shape, "int8", hopper)
    y = linear_8bit(codes, scale, weight, weight_scale, None, torch.float32, tile=tile)
    assert relative_error(y, exact) < 1e-6
    for dtype in (torch.float32, torch.bfloat16):
        first, second = (linear_8bit(codes, scale, weight, weight_scale, None, dtype, tile=tile) for _ in range(2))
        plain = linear_8bit(codes, scale, weight, weight_scale, None, dtype, tile=Tile(64, 64, 128, 0, 4, 4))
        assert torch.equal(first, second)
        assert torch.equal(first, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("n", [101, 264])
def test_bias_residual_and_rounding(n: int, tile: Tile, hopper: torch.device) -> None:
    codes, scale, weight, weight_scale, exact = operands(200, n, 256, "int8", hopper)
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(n, generator=generator).bfloat16().to(hopper)
    residual = torch.randn(200, n, generator=generator).bfloat16().to(hopper)
    y = linear_8bit(codes, scale, weight, weight_scale, bias, torch.float32, tile=tile)
    assert relative_error(y, exact + bias.double()) < 1e-6
    expected = exact + bias.double() + residual.double()
    assert linear_8bit(codes, scale, weight, weight_scale, bias, torch.bfloat16, residual, tile) is residual
    assert relative_error(residual, expected) < 8e-3


@pytest.mark.gpu
def test_a_graph_reads_what_its_operands_hold_when_it_runs(hopper: torch.device) -> None:
    """Descriptors hold addresses alone."""
    codes, scale, weight, weight_scale, _ = operands(300, 512, 256, "int8", hopper)
    others = operands(300, 512, 256, "int8", hopper)[0].flip(0)

    def call() -> torch.Tensor:
        return linear_8bit(codes, scale, weight, weight_scale, None, torch.bfloat16, tile=TILES[0])

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    codes.copy_(others)
    graph.replay()
    assert torch.equal(y, call())


SCRIPT = """
from octavo.ops.triton import ahead, linear_8bit, linear_int8_async, runtime

runtime.has_dependent_launch = lambda device: True
codes, scale = torch.zeros(8, 256, dtype=torch.int8), torch.zeros(8, 1)
bias = torch.zeros(8, dtype=torch.bfloat16)

def launch():
    for size in ((128, 128, 4, 3), (64, 256, 4, 4)):
        for dtype, shift, added in ((torch.bfloat16, None, True), (torch.float32, bias, False)):
            y = torch.zeros(8, 8, dtype=dtype)
            tile = linear_8bit.async_tile(*size)
            linear_int8_async.launch(codes, scale, codes, scale[:, 0], shift, y if added else None, y, tile)

print(ahead.compile_ahead(launch), ahead.compile_ahead(launch))
for kernel in linear_int8_async.int8_kernel.device_caches[0][0].values():
    ptx = kernel.asm["ptx"]
    print(ptx.count("wgmma.wait_group.sync.aligned 1;"), ptx.count("wgmma.wait_group.sync.aligned 0;"))
"""


@pytest.mark.skipif(not triton.__version__.startswith(linear_8bit_parts.GLUON), reason="another Gluon")
def test_kernels_compile_ahead_and_wait_for_the_tile_before(tmp_path: Path) -> None:
    assert run_without_gpu(SCRIPT, tmp_path) == ["4 0"] + ["1 1"] * 4


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_another_kernel_serves_where_this_one_does_not(kind: str, tile: Tile, device: torch.device) -> None:
    for k in (128, 144):
        codes, scale, weight, weight_scale, exact = operands(5, 40, k, kind, device)
        y = linear_8bit(codes, scale, weight, weight_scale, None, torch.float32, tile=tile)
        assert relative_error(y, exact) < 2e-3


def test_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_8bit_parts, "has_async", lambda device: True)
    assert takes_async(torch.zeros(3, 256, dtype=torch.int8))
    assert not takes_async(torch.zeros(3, 192, dtype=torch.int8))
    assert not takes_async(torch.zeros(3, 256, dtype=torch.uint8).view(torch.float8_e4m3fn))
    monkeypatch.setattr(linear_8bit_parts, "has_async", lambda device: False)
    assert not takes_async(torch.zeros(3, 256, dtype=torch.int8))


@pytest.mark.parametrize(
    ("capability", "release", "serves"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.7.1", False), ((9, 0), "3.5.1", False), ((10, 0), "3.6.0", False)],
)
def test_which_devices_and_releases_are_served(
    capability: tuple[int, int], release: str, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", release)
    assert has_async.__wrapped__(torch.device("cuda")) is serves
    assert not has_async.__wrapped__(torch.device("cpu"))


def test_shapes_that_nobody_measured() -> None:
    """With tiles enough for a GPU, and rows enough for a tile."""
    assert tile_8bit("w8a8", 8192, 8192, 300) == tile_8bit("w8a8", 8192, 8192, 9000) == TILES[0]
    assert tile_8bit("w8a8", 1024, 4096, 300) == default_tile(1024, 4096, bucket(300))
    assert tile_8bit("w8a8", 8192, 8192, 128) == default_tile(8192, 8192, 128)
    assert tile_8bit("fp8", 8192, 8192, 300).rows == 0
    n = 128 * ASYNC_TILES // 4
    assert tile_8bit("w8a8", n, 2048, 512) == TILES[0] != tile_8bit("w8a8", n - 128, 2048, 512)


def test_tiles_of_the_table_fit() -> None:
    found = {key: tile for key, tile in runtime.read_tiles(TABLE).items() if tile.k == 0 < tile.rows}
    assert set(found.values()) == set(TILES)
    for (kind, _, k, rows), tile in found.items():
        assert kind == "w8a8" and k % ASYNC_COLUMNS == 0 and rows >= 128 and tile.split == 0
        assert (tile.rows + tile.n) * ASYNC_COLUMNS * tile.stages + (16 << 10) <= runtime.MAX_SHARED
