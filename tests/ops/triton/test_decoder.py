"""Decoder layers in few launches against the same layers in float32, operation by operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact import exact_casts  # noqa: F401
from paged import Step, relative_error
from random_weights import quantized
from torch import Tensor

from octavo import ops
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.ops import reference
from octavo.ops.decoder import DecoderLayer
from octavo.ops.packed_weight import TorchDense
from octavo.ops.triton import decoder, runtime
from octavo.ops.triton.scaled import Scaled
from octavo.ops.triton.weights import TritonCodes, TritonDense
from octavo.ops.triton.weights_8bit import Triton8Bit

HIDDEN, INNER, HEADS, KV_HEADS, D = 96, 160, 6, 2, 32
BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("attention_that_runs_here")


@pytest.fixture
def attention_that_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no product of bf16, so attention, which has tests of its own, is the reference there."""
    if not runtime.is_native():
        monkeypatch.setattr(decoder, "_rotary_and_attend", lambda *args: NotImplemented)
        monkeypatch.setattr(decoder, "_rotary_and_store", whole_rotary_and_store)
        monkeypatch.setattr(decoder, "_paged_attention", reference.paged_attention)


def whole_rotary_and_store(qkv: Tensor | Scaled, *args: Any) -> Tensor:
    return reference.rotary_and_store(decoder._whole(qkv), *args)


def make_layer(kind: str, generator: torch.Generator, device: torch.device, **changes: Any) -> DecoderLayer:
    def weight(n: int, k: int) -> ops.PackedWeight:
        if kind in ("dense", "torch"):
            dense = (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()
            return TritonDense(dense, device) if kind == "dense" else TorchDense(dense, BF16, device)
        if kind == "fp8":
            codes, scale = reference.quantize_rows(torch.randn(n, k, generator=generator) / k**0.5, kind)
            scheme = WeightScheme(8, "float", True, "channel", None, ActivationScheme(type="float"))
            return Triton8Bit(QuantizedWeight(scheme, (n, k), codes, scale), device)
        packed = quantized(n, k, kind, 32, generator)
        packed.scale *= 0.01 if kind[0] == "8" else 0.2
        if packed.offset is not None:
            packed.offset *= 0.2
        return TritonCodes(packed, device)

    layer = DecoderLayer(
        qkv=weight((HEADS + 2 * KV_HEADS) * D, HIDDEN),
        output=weight(HIDDEN, HEADS * D),
        gate_up=weight(2 * INNER, HIDDEN),
        down=weight(HIDDEN, INNER),
        input_norm=vector(HIDDEN, generator, device),
        post_norm=vector(HIDDEN, generator, device),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=D,
        eps=1e-5,
        scale=D**-0.5,
    )
    return replace(layer, **changes)


def vector(n: int, generator: torch.Generator, device: torch.device) -> Tensor:
    return (1 + 0.3 * torch.randn(n, generator=generator)).bfloat16().to(device)


def exact(layer: DecoderLayer, x: Tensor, cos_sin: Tensor, step: Step, cache: ops.KVCache) -> Tensor:
    """The layer in float32, but for the cache."""

    def product(x: Tensor, weight: ops.PackedWeight, bias: Tensor | None) -> Tensor:
        if weight.input_kind is not None:
            codes, scale = reference.quantize_rows(x, weight.input_kind)
            x = codes.float() * scale
        dense = weight.rows(torch.arange(weight.shape[0], device=x.device), torch.float32)
        return F.linear(x, dense, None if bias is None else bias.float())

    y = product(reference.rms_norm(x, layer.input_norm, layer.eps), layer.qkv, layer.qkv_bias)
    norms = (layer.q_norm, layer.k_norm, layer.head_eps, False)
    q = reference.rotary_and_store(y, step.positions, cos_sin, cache, step.meta, HEADS, KV_HEADS, D, *norms)
    wide = ops.KVCache(cache.k.float(), cache.v.float())
    y = reference.paged_attention(q, wide, step.meta, layer.scale, layer.window, layer.softcap, None)
    x = x + product(y, layer.output, layer.output_bias)
    y = product(reference.rms_norm(x, layer.post_norm, layer.eps), layer.gate_up, layer.gate_up_bias)
    y = reference.silu_mul(y) if layer.activation == "silu" else reference.gelu_tanh_mul(y)
    return x + product(y, layer.down, layer.down_bias)


def compare(
    layers: list[DecoderLayer], rows: list[int], lengths: list[int], device: torch.device, tolerance: float = 0.0
) -> None:
    assert all(decoder.rejects_layer(layer) is None for layer in layers)
    generator = torch.Generator().manual_seed(7)
    step = Step(rows, lengths, 16, KV_HEADS, D, device, BF16)
    angles = torch.arange(max(lengths))[:, None] * torch.rand(D // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    caches = [[ops.KVCache(step.cache.k.clone(), step.cache.v.clone()) for _ in layers] for _ in range(2)]
    x = torch.randn(sum(rows), HIDDEN, generator=generator).bfloat16().to(device)
    expected = x.float()
    for layer, cache in zip(layers, caches[0], strict=True):
        expected = exact(layer, expected, cos_sin, step, cache)
    done = decoder.fuse(layers)(x, step.positions, cos_sin, caches[1], [step.meta] * len(layers))
    assert done is not None
    actual = done[0].float() + done[1].float()
    assert relative_error(actual, expected) < max(tolerance, 1.5e-2 if runtime.is_native() else 3e-2)
    for left, right in zip(*caches, strict=True):
        assert relative_error(right.k.nan_to_num(), left.k.nan_to_num()) < max(tolerance, 3e-2)
        assert torch.equal(left.v.isnan(), right.v.isnan())


STEPS = [([1], [5]), ([1, 1, 1], [3, 17, 40]), ([1, 1, 9], [8, 30, 9])]


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("4m", "8s")]  # half a minute each in the interpreter


@pytest.mark.parametrize("kind", ["dense", "torch", "4s", *SLOW])
@pytest.mark.parametrize(("rows", "lengths"), STEPS)
def test_layers(kind: str, rows: list[int], lengths: list[int], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    compare([make_layer(kind, generator, device) for _ in range(2)], rows, lengths, device)


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize(("rows", "lengths"), [([1] * 3, [3, 17, 40]), ([1] * 40, [*range(1, 41)]), ([70], [90])])
@pytest.mark.usefixtures("exact_casts")
def test_layers_of_fp8(has_biases: bool, rows: list[int], lengths: list[int], device: torch.device) -> None:
    """From 33 rows on, each product leaves its scales to what reads it, unless a bias follows."""
    generator = torch.Generator().manual_seed(5)
    changes: dict[str, Any] = {}
    if has_biases:
        changes = {"qkv_bias": vector((HEADS + 2 * KV_HEADS) * D, generator, device)}
        changes |= {"down_bias": vector(HIDDEN, generator, device)}
    layers = [make_layer("fp8", generator, device, **changes) for _ in range(2)]
    compare(layers, rows, lengths, device, tolerance=6e-2)


@pytest.mark.parametrize(("rows", "lengths"), STEPS)
def test_biases_head_norms_windows_and_gelu(rows: list[int], lengths: list[int], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    sizes = {
        "qkv_bias": (HEADS + 2 * KV_HEADS) * D,
        "output_bias": HIDDEN,
        "gate_up_bias": 2 * INNER,
        "down_bias": HIDDEN,
        "q_norm": D,
        "k_norm": D,
    }
    changes: dict[str, Any] = {name: vector(size, generator, device) for name, size in sizes.items()}
    changes |= {"window": 12, "softcap": 3.0, "activation": "gelu_tanh"}
    compare([make_layer("dense", generator, device, **changes) for _ in range(2)], rows, lengths, device)


def test_what_is_not_served(device: torch.device) -> None:
    layer = make_layer("dense", torch.Generator().manual_seed(3), device)
    assert "relu" in str(decoder.rejects_layer(replace(layer, activation="relu")))
    assert "bfloat16" in str(decoder.rejects_layer(replace(layer, input_norm=layer.input_norm.float())))
    assert "qkv has shape" in str(decoder.rejects_layer(replace(layer, num_heads=4)))
    if device.type == "cpu":
        assert decoder.rejects([layer]) is not None
    step = Step([1], [5], 16, KV_HEADS, D, device, BF16)
    cache = ops.KVCache.allocate(2, 16, KV_HEADS, D, BF16, device, interleaved=True)
    x = torch.zeros(1, HIDDEN, dtype=BF16, device=device)
    assert decoder.fuse([layer])(x, step.positions, torch.zeros(8, D, device=device), [cache], [step.meta]) is None


@pytest.mark.gpu
def test_replays_of_a_graph_repeat_the_step(device: torch.device) -> None:
    """Captured once, replayed with other inputs, with and without dependent launches: as if run by hand."""
    generator = torch.Generator().manual_seed(4)
    layers = [make_layer("4s", generator, device) for _ in range(3)]
    step = Step([1, 1], [40, 70], 16, KV_HEADS, D, device, BF16)
    cos_sin = torch.rand(80, D, generator=generator).to(device)
    caches = [ops.KVCache(step.cache.k.clone(), step.cache.v.clone()) for _ in layers]
    fused = decoder.fuse(layers)
    x = torch.zeros(2, HIDDEN, dtype=BF16, device=device)

    def run() -> Tensor:
        done = fused(x, step.positions, cos_sin, caches, [step.meta] * len(layers))
        assert done is not None
        return done[0] + done[1]

    try:
        for dependent in (True, False):
            runtime.dependent_launch = dependent
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run()
            for _ in range(3):
                x.copy_(torch.randn(2, HIDDEN, generator=generator).bfloat16())
                graph.replay()
                assert torch.equal(out, run())
    finally:
        runtime.dependent_launch = True
