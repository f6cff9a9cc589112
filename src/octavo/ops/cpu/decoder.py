"""Whole decoder layers in one call of the compiled kernels; see layer.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.ops.cpu import library
from octavo.ops.cpu.functions import AMX_FROM, TILE_ROWS, cache_address
from octavo.ops.cpu.weights import CpuWeight
from octavo.ops.kv_cache import AttentionMetadata, KVCache

if TYPE_CHECKING:
    from octavo.ops.decoder import DecoderLayer

ACTIVATIONS = ("silu", "gelu_tanh")
_PARTS = ("qkv", "output", "gate_up", "down")
_NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")


class _LayerStruct(ctypes.Structure):
    """Mirrors `struct Layer` of layer.cpp."""

    _fields_ = (
        *[(f"{part}{field}", ctypes.c_void_p) for part in _PARTS for field in ("", "_bias")],
        *[(norm, ctypes.c_void_p) for norm in _NORMS],
        *[(name, ctypes.c_int64) for name in ("hidden", "inner", "num_heads", "window", "gelu", "amx_from")],
        *[(name, ctypes.c_float) for name in ("eps", "head_eps", "scale", "softcap")],
    )


class _StepStruct(ctypes.Structure):
    """Mirrors `struct Step` of layer.cpp."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("positions", "slots", "cos_sin")],
        *[(name, ctypes.c_void_p) for name in ("query_start", "seq_lens", "block_table")],
        *[(name, ctypes.c_int64) for name in ("rows", "half", "table_stride", "num_requests")],
    )


def rejects(layers: Sequence[DecoderLayer]) -> str | None:
    """Why the fused layers do not serve this model, or None."""
    if library.unavailable() is not None:
        return library.unavailable()
    for layer in layers:
        reason = _rejects_layer(layer)
        if reason is not None:
            return reason
    return None


def _rejects_layer(layer: DecoderLayer) -> str | None:
    if not all(isinstance(getattr(layer, part), CpuWeight) for part in _PARTS):
        return "a projection is not in CPU tiles"
    tensors = [getattr(layer, name) for name in (*_NORMS, *[f"{part}_bias" for part in _PARTS])]
    if any(x is not None and (x.dtype != torch.bfloat16 or not x.is_contiguous()) for x in tensors):
        return "norms and biases must be contiguous bfloat16"
    if layer.activation not in ACTIVATIONS:
        return f"activation {layer.activation} is not one of {', '.join(ACTIVATIONS)}"
    d, heads, kv_heads = layer.head_dim, layer.num_heads, layer.num_kv_heads
    if d % 16 or d > library.MAX_HEAD_DIM or heads > TILE_ROWS * kv_heads:
        return f"head size {d} with {heads} heads on {kv_heads} has no attention kernel"
    hidden, inner = layer.input_norm.shape[0], layer.down.shape[1]
    shapes = {"qkv": ((heads + 2 * kv_heads) * d, hidden), "output": (hidden, heads * d)}
    shapes |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    for name, shape in shapes.items():
        if getattr(layer, name).shape != shape:
            return f"{name} has shape {getattr(layer, name).shape}, not {shape}"
    return None


def fuse(layers: Sequence[DecoderLayer]) -> Callable[..., tuple[Tensor, Tensor] | None]:
    """The call for layers that `rejects` lets through; `octavo.ops.fuse_decoder` describes it."""
    structs = [_layer_struct(layer) for layer in layers]
    addresses = [ctypes.addressof(struct) for struct in structs]
    cpu_library: Any = library.load()[0]
    kernel = cpu_library.octavo_decoder_layer
    kept = (layers, structs)  # the addresses point into them

    def fused(
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> tuple[Tensor, Tensor] | None:
        assert len(kept[0]) == len(caches) == len(metadata)
        if not all(cache.interleaved for cache in caches) or not x.is_contiguous():
            return None
        if x.dtype is not torch.bfloat16 or cos_sin.dtype is not torch.float32:
            return None
        residual = torch.empty_like(x)
        x_address, residual_address = x.data_ptr(), residual.data_ptr()
        first = True
        steps: dict[int, _StepStruct] = {}  # layers of a cache group share their metadata
        for address, cache, meta in zip(addresses, caches, metadata, strict=True):
            step = steps.get(id(meta))
            if step is None:
                step = steps[id(meta)] = _step_struct(positions, cos_sin, meta)
            kernel(address, ctypes.addressof(step), cache_address(cache), x_address, residual_address, first)
            first = False
        return x, residual

    return fused


def _layer_struct(layer: DecoderLayer) -> _LayerStruct:
    struct = _LayerStruct(
        hidden=layer.input_norm.shape[0],
        inner=layer.down.shape[1],
        num_heads=layer.num_heads,
        window=layer.window or 0,
        gelu=layer.activation == "gelu_tanh",
        amx_from=AMX_FROM,
        eps=layer.eps,
        head_eps=layer.head_eps,
        scale=layer.scale,
        softcap=layer.softcap or 0.0,
    )
    for part in _PARTS:
        setattr(struct, part, getattr(layer, part).address)
    for name in (*_NORMS, *[f"{part}_bias" for part in _PARTS]):
        tensor = getattr(layer, name)
        setattr(struct, name, None if tensor is None else tensor.data_ptr())
    return struct


def _step_struct(positions: Tensor, cos_sin: Tensor, meta: AttentionMetadata) -> _StepStruct:
    table = meta.block_table
    return _StepStruct(
        positions=positions.data_ptr(),
        slots=meta.slot_mapping.data_ptr(),
        cos_sin=cos_sin.data_ptr(),
        query_start=meta.query_start.data_ptr(),
        seq_lens=meta.seq_lens.data_ptr(),
        block_table=table.data_ptr(),
        rows=positions.shape[0],
        half=cos_sin.shape[1] // 2,
        table_stride=table.stride(0),
        num_requests=table.shape[0],
    )
