"""Whole decoder layers in few launches. Imports no triton; its kernels are imported on first use.

A step of few rows that are all decodes takes five launches a layer: norm and qkv, rotary and store and attention,
output projection and residual, norm and gate and up and activation, down projection and residual. Each reads its
weights about once, and starts while the one ahead still runs. Other steps take single operations, with the residual
added by the norm; and layers whose inputs are rounded to 8 bits let the norm and the activation round them, and apply
the scales of the product ahead where that left them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.ops.kv_cache import AttentionMetadata, KVCache
from octavo.ops.packed_weight import PackedWeight
from octavo.ops.triton import runtime
from octavo.ops.triton.scaled import Scaled
from octavo.ops.triton.weights import TritonWeight
from octavo.ops.triton.weights_8bit import Triton8Bit

if TYPE_CHECKING:
    from octavo.ops.decoder import DecoderLayer

FUSED_ROWS = 16  # up to here the norm is repeated in every program of a product, which then costs less than a launch
ACTIVATIONS = ("silu", "gelu_tanh")
_PARTS = ("qkv", "output", "gate_up", "down")
_NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")

_rotary_and_attend = runtime.lazy("attention_fused", "rotary_and_attend")
_rotary_and_store = runtime.lazy("rotary", "rotary_and_store")
_paged_attention = runtime.lazy("attention", "paged_attention")
_rms_norm = runtime.lazy("elementwise", "rms_norm")
_add_rms_norm = runtime.lazy("elementwise", "add_rms_norm")
_norm_quant = runtime.lazy("elementwise", "add_rms_norm_quant")
_gated_quant = runtime.lazy("elementwise", "gated_quant")
_silu_mul = runtime.lazy("elementwise", "silu_mul")
_gelu_tanh_mul = runtime.lazy("elementwise", "gelu_tanh_mul")
_quantize_rows = runtime.lazy("quantize", "quantize_rows")
_apply_scales = runtime.lazy("linear_8bit_parts", "apply_scales")


def rejects(layers: Sequence[DecoderLayer]) -> str | None:
    """Why these kernels do not serve the layers, or None."""
    if runtime.unavailable() is not None:
        return runtime.unavailable()
    return next((reason for reason in map(rejects_layer, layers) if reason is not None), None)


def rejects_layer(layer: DecoderLayer) -> str | None:
    """The same for one layer, wherever its tensors are."""
    if layer.activation not in ACTIVATIONS:
        return f"activation {layer.activation} is not one of {', '.join(ACTIVATIONS)}"
    for name in (*_NORMS, *[f"{part}_bias" for part in _PARTS]):
        tensor = getattr(layer, name)
        if tensor is not None and not (tensor.dtype == torch.bfloat16 and tensor.is_contiguous()):
            return "norms and biases must be contiguous bfloat16"
    if layer.input_norm.device.type == "cpu" and runtime.is_native():
        return "serves CUDA, not cpu"
    d, hidden, inner = layer.head_dim, layer.input_norm.shape[0], layer.down.shape[1]
    if layer.num_heads % layer.num_kv_heads or layer.num_heads > 64 * layer.num_kv_heads:
        return f"{layer.num_heads} heads on {layer.num_kv_heads} have no attention kernel"
    shapes = {"qkv": ((layer.num_heads + 2 * layer.num_kv_heads) * d, hidden), "output": (hidden, layer.num_heads * d)}
    shapes |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    for name, shape in shapes.items():
        weight = getattr(layer, name)
        if weight.shape != shape:
            return f"{name} has shape {weight.shape}, not {shape}"
    return None


def fuse(layers: Sequence[DecoderLayer]) -> Callable[..., tuple[Tensor, Tensor] | None]:
    """The call for layers that `rejects` lets through; `octavo.ops.fuse_decoder` describes it."""
    layers = tuple(layers)
    takes_few = all(isinstance(getattr(layer, part), TritonWeight) for layer in layers for part in _PARTS)

    def fused(
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> tuple[Tensor, Tensor] | None:
        assert len(layers) == len(caches) == len(metadata)
        if any(cache.interleaved for cache in caches) or not x.is_contiguous() or x.dtype is not torch.bfloat16:
            return None
        rows = x.shape[0]
        is_few = takes_few and rows <= FUSED_ROWS and metadata[0].num_decodes == rows
        run = _run_few if is_few else _run_many
        return run(layers, x, positions, cos_sin, caches, metadata)

    return fused


def _attend(
    layer: DecoderLayer,
    qkv: Tensor | Scaled,
    positions: Tensor,
    cos_sin: Tensor,
    cache: KVCache,
    meta: AttentionMetadata,
) -> Tensor:
    heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
    norms = (layer.q_norm, layer.k_norm, layer.head_eps, False)
    rows = positions.shape[0]
    if meta.num_decodes == rows and meta.num_shared is None:
        options = (layer.scale, layer.window, layer.softcap)
        out = _rotary_and_attend(qkv, positions, cos_sin, cache, meta, *heads, *options, *norms)
        if out is not NotImplemented:
            return out
    q = _rotary_and_store(qkv, positions, cos_sin, cache, meta, *heads, *norms)
    assert q is not NotImplemented
    out = _paged_attention(q, cache, meta, layer.scale, layer.window, layer.softcap, None)
    assert out is not NotImplemented
    return out


def _run_few(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    caches: Sequence[KVCache],
    metadata: Sequence[AttentionMetadata],
) -> tuple[Tensor, Tensor]:
    """Every product reads the residual stream, or writes it to a new tensor: no program changes what others read."""
    last = len(layers) - 1
    for i, (layer, cache, meta) in enumerate(zip(layers, caches, metadata, strict=True)):
        qkv, output, gate_up, down = layer.qkv, layer.output, layer.gate_up, layer.down
        assert isinstance(qkv, TritonWeight) and isinstance(output, TritonWeight)
        assert isinstance(gate_up, TritonWeight) and isinstance(down, TritonWeight)
        y = qkv.few(x, layer.qkv_bias, norm=layer.input_norm, eps=layer.eps)
        y = _attend(layer, y, positions, cos_sin, cache, meta)
        x = output.few(y, layer.output_bias, residual=x)
        y = gate_up.few(x, layer.gate_up_bias, norm=layer.post_norm, eps=layer.eps, gate=layer.activation)
        if i == last:  # the final norm adds it
            return down.few(y, layer.down_bias), x
        x = down.few(y, layer.down_bias, residual=x)
    raise AssertionError("no layers")


def _run_many(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    caches: Sequence[KVCache],
    metadata: Sequence[AttentionMetadata],
) -> tuple[Tensor, Tensor]:
    residual: Tensor | None = None
    y: Tensor | Scaled = x
    for layer, cache, meta in zip(layers, caches, metadata, strict=True):
        before, residual = residual, x if residual is None else residual
        qkv = _normed_product(y, before, layer.input_norm, layer.eps, layer.qkv, layer.qkv_bias)
        y = _product(_attend(layer, qkv, positions, cos_sin, cache, meta), layer.output, layer.output_bias)
        y = _normed_product(y, residual, layer.post_norm, layer.eps, layer.gate_up, layer.gate_up_bias)
        y = _gated_product(y, layer.activation, layer.down, layer.down_bias)
    assert residual is not None
    return _whole(y), residual


def _whole(x: Tensor | Scaled) -> Tensor:
    """x for who takes no scales."""
    whole: Tensor = _apply_scales(x) if isinstance(x, Scaled) else x
    return whole


def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor | Scaled:
    kind = _own_kind(weight)
    if kind is not None and isinstance(weight, Triton8Bit):
        codes, scale = _quantize_rows(x, kind)
        return _quantized_product(codes, scale, weight, bias)
    return weight.linear(x, bias, torch.bfloat16)


def _quantized_product(codes: Tensor, scale: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor | Scaled:
    """What reads it can apply the scales, but no bias after them."""
    if bias is None and isinstance(weight, Triton8Bit):
        return weight.linear_for_reader(codes, scale)
    return weight.linear_quantized(codes, scale, bias, torch.bfloat16)


def _normed_product(
    x: Tensor | Scaled, residual: Tensor | None, norm: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None
) -> Tensor | Scaled:
    """The product of the norm of x plus the residual, which is changed in place."""
    kind = _own_kind(weight)
    if kind is not None:
        codes, scale = _norm_quant(x, residual, norm, eps, kind)
        return _quantized_product(codes, scale, weight, bias)
    x = _whole(x)
    y = _rms_norm(x, norm, eps) if residual is None else _add_rms_norm(x, residual, norm, eps)
    return weight.linear(y, bias, torch.bfloat16)


def _own_kind(weight: PackedWeight) -> str | None:
    """What the weight's input is rounded to by a scale a row; a static scale is applied by the product."""
    return weight.input_kind if weight.input_scale is None else None


def _gated_product(x: Tensor | Scaled, activation: str, weight: PackedWeight, bias: Tensor | None) -> Tensor | Scaled:
    kind = _own_kind(weight)
    if kind is not None:
        codes, scale = _gated_quant(x, activation, kind)
        return _quantized_product(codes, scale, weight, bias)
    x = _whole(x)
    y = _silu_mul(x) if activation == "silu" else _gelu_tanh_mul(x)
    return weight.linear(y, bias, torch.bfloat16)
