"""The layouts of 8-bit products against the torch layout that defines them."""

from __future__ import annotations

import pytest
import torch
from exact import exact_casts  # noqa: F401
from torch import Tensor

from octavo import ops
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.ops import reference
from octavo.ops.packed_weight import TorchQuantized
from octavo.ops.triton import decoder, elementwise, quantize, weights_8bit

pytestmark = pytest.mark.usefixtures("exact_casts")
KINDS = ("int8", "fp8")


def make(n: int, k: int, kind: str, group: int | None = None) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(n + k)
    of = "int" if kind == "int8" else "float"
    if kind == "int8":
        codes = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    else:
        codes = (torch.randn(n, k, generator=generator) * 100).to(torch.float8_e4m3fn)
    scale = ((torch.rand(n, k // (group or k), generator=generator) + 0.5) / 100).bfloat16()
    scheme = WeightScheme(8, of, True, "group" if group else "channel", group, ActivationScheme(type=of))
    return QuantizedWeight(scheme, (n, k), codes, scale)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 20])
def test_equals_the_torch_layout(rows: int, kind: str, device: torch.device) -> None:
    weight = make(72, 160, kind)
    packed = weights_8bit.pack(weight, torch.bfloat16, device)
    torch_layout = TorchQuantized(weight, torch.bfloat16, device)
    assert packed.input_kind == kind
    assert packed.num_bytes == 72 * 160 + 72 * 4
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 160, generator=generator).bfloat16().to(device)
    bias = torch.randn(72, generator=generator).bfloat16().to(device)
    y = ops.linear(x, packed, bias, torch.float32)
    tolerance = 1e-6 if kind == "int8" else 2e-3
    assert relative_error(y, ops.linear(x, torch_layout, bias, torch.float32)) < tolerance
    assert relative_error(ops.linear(x, packed), ops.linear(x, torch_layout)) < 5e-3
    ids = torch.tensor([[0, 71], [5, 5]], device=device)
    assert torch.equal(packed.rows(ids, torch.float32), torch_layout.rows(ids, torch.float32))
    with pytest.raises(ValueError, match="x has 80 columns"):
        ops.linear(x[:, :80], packed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_static_scale(kind: str, device: torch.device) -> None:
    weight = make(64, 96, kind)
    weight.input_scale = 0.02
    packed = weights_8bit.pack(weight, torch.bfloat16, device)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
    x[1, :2] = torch.tensor([90.0, -90.0], dtype=x.dtype)  # beyond the largest code
    codes, scale = quantize.quantize_rows(x, kind, packed.input_scale)
    expected = reference.quantize_rows(x, kind, 0.02)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale, expected[1])
    y = ops.linear(x, TorchQuantized(weight, torch.bfloat16, device))
    assert relative_error(ops.linear(x, packed), y) < 5e-3
    layer_input = decoder._normed_product(x, None, torch.ones(96, device=device).bfloat16(), 1e-5, packed, None)
    normed = elementwise.rms_norm(x, torch.ones(96, device=device).bfloat16(), 1e-5)
    assert torch.equal(layer_input, packed.linear(normed, None, torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_quantized_with_the_norm_give_the_same_product(kind: str, device: torch.device) -> None:
    packed = weights_8bit.pack(make(64, 96, kind), torch.bfloat16, device)
    generator = torch.Generator().manual_seed(4)
    x, residual = (torch.randn(3, 96, generator=generator).bfloat16().to(device) for _ in range(2))
    norm = torch.randn(96, generator=generator).bfloat16().to(device)
    other = residual.clone()
    codes, scale = elementwise.add_rms_norm_quant(x, other, norm, 1e-5, kind)
    elementwise.add_rms_norm(x, residual, norm, 1e-5)
    expected = packed.linear(elementwise.rms_norm(residual.float(), norm, 1e-5), None, torch.bfloat16)
    assert torch.equal(packed.linear_quantized(codes, scale, None, torch.bfloat16), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_layout_is_chosen_and_serves_many_rows(kind: str, device: torch.device) -> None:
    weight = make(256, 512, kind)
    packed = ops.pack_weight(weight, torch.bfloat16, device)
    assert isinstance(packed, weights_8bit.Triton8Bit)
    torch_layout = TorchQuantized(weight, torch.bfloat16, device)
    bias = torch.randn(256, device=device).bfloat16()
    for rows in (64, 128, 129, 1000):
        x = torch.randn(rows, 512, device=device).bfloat16()
        assert relative_error(ops.linear(x, packed, bias), ops.linear(x, torch_layout, bias)) < 5e-3


@pytest.mark.gpu
def test_a_product_can_be_replayed_in_a_graph(device: torch.device) -> None:
    packed = weights_8bit.pack(make(4096, 4096, "int8"), torch.bfloat16, device)
    x = torch.randn(8, 4096, device=device).bfloat16()
    packed.linear(x, None, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = packed.linear(x, None, torch.bfloat16)
    for seed in range(3):
        x.copy_(torch.randn(8, 4096, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(y, packed.linear(x, None, torch.bfloat16))


def test_what_the_layout_does_not_take() -> None:
    cpu = torch.device("cpu")
    assert weights_8bit.rejects(make(16, 32, "fp8"), torch.bfloat16, cpu) == "serves cuda, not cpu"


@pytest.mark.gpu
def test_what_the_layout_does_not_take_on_a_gpu(device: torch.device) -> None:
    assert weights_8bit.rejects(make(16, 64, "int8", group=32), torch.bfloat16, device) is not None
    assert weights_8bit.rejects(make(16, 24, "int8"), torch.bfloat16, device) is not None
    assert weights_8bit.rejects(torch.zeros(16, 64), torch.bfloat16, device) is not None
    assert weights_8bit.rejects(make(16, 64, "int8"), torch.bfloat16, device) is None
