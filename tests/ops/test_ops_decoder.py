"""Fused decoder layers against the same layers operation by operation: the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from random_weights import quantized
from torch import Tensor

from octavo import ops
from octavo.ops.cpu import library
from octavo.ops.decoder import DecoderLayer

needs_kernels = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
HIDDEN, INNER, HEADS, KV_HEADS, D = 96, 160, 6, 2, 32
BLOCK = 16


def make_layer(kind: str, generator: torch.Generator, **changes: Any) -> DecoderLayer:
    """A random layer whose projections are dense or of a quantized kind, small enough not to blow up."""

    def weight(n: int, k: int) -> ops.PackedWeight:
        if kind == "dense":
            return ops.pack_weight((torch.randn(n, k, generator=generator) / k**0.5).bfloat16(), torch.bfloat16)
        packed = quantized(n, k, kind, None if kind == "8a" else 32, generator)
        packed.scale *= 0.01 if kind[0] == "8" else 0.2
        if packed.offset is not None:
            packed.offset *= 0.2
        return ops.pack_weight(packed, torch.bfloat16)

    def vector(n: int) -> Tensor:
        return (1 + 0.3 * torch.randn(n, generator=generator)).bfloat16()

    layer = DecoderLayer(
        qkv=weight((HEADS + 2 * KV_HEADS) * D, HIDDEN),
        output=weight(HIDDEN, HEADS * D),
        gate_up=weight(2 * INNER, HIDDEN),
        down=weight(HIDDEN, INNER),
        input_norm=vector(HIDDEN),
        post_norm=vector(HIDDEN),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=D,
        eps=1e-5,
        scale=D**-0.5,
    )
    return replace(layer, **changes)


def step_of(rows: list[int], lengths: list[int]) -> tuple[ops.AttentionMetadata, Tensor, int]:
    """Metadata, positions and the number of blocks of requests that lie one after another."""
    counts = [-(-length // BLOCK) for length in lengths]
    table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    taken = 1
    for s, count in enumerate(counts):
        table[s, :count] = torch.arange(taken, taken + count)
        taken += count
    places = [(s, j) for s, length in enumerate(lengths) for j in range(length - rows[s], length)]
    slots = torch.tensor([int(table[s, j // BLOCK]) * BLOCK + j % BLOCK for s, j in places])
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    meta = ops.AttentionMetadata(
        starts, torch.tensor(lengths, dtype=torch.int32), table, slots, max(rows), max(lengths), rows.count(1)
    )
    return meta, torch.tensor([j for _, j in places]), taken


def one_by_one(
    x: Tensor, layers: list[DecoderLayer], positions: Tensor, cos_sin: Tensor, caches: list[ops.KVCache], meta: Any
) -> tuple[Tensor, Tensor]:
    residual = None
    for layer, cache in zip(layers, caches, strict=True):
        if residual is None:
            residual, x = x.clone(), ops.rms_norm(x, layer.input_norm, layer.eps)
        else:
            x = ops.add_rms_norm(x, residual, layer.input_norm, layer.eps)
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        norms = (layer.q_norm, layer.k_norm, layer.head_eps)
        q = ops.rotary_and_store(qkv, positions, cos_sin, cache, meta, HEADS, KV_HEADS, D, *norms)
        x = ops.paged_attention(q, cache, meta, layer.scale, layer.window, layer.softcap)
        x = ops.linear(x, layer.output, layer.output_bias)
        x = ops.add_rms_norm(x, residual, layer.post_norm, layer.eps)
        activation = ops.silu_mul if layer.activation == "silu" else ops.gelu_tanh_mul
        x = ops.linear(activation(ops.linear(x, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias)
    assert residual is not None
    return x, residual


def compare(layers: list[DecoderLayer], rows: list[int], lengths: list[int], generator: torch.Generator) -> None:
    fused = ops.fuse_decoder(layers)
    assert fused is not None
    meta, positions, num_blocks = step_of(rows, lengths)
    angles = torch.arange(max(lengths))[:, None] * torch.rand(D // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    caches: list[list[ops.KVCache]] = [[], []]
    for _ in layers:
        pair = [ops.KVCache.allocate(num_blocks, BLOCK, KV_HEADS, D, torch.bfloat16) for _ in range(2)]
        pair[0].k.normal_(generator=generator)
        pair[0].v.normal_(generator=generator)
        pair[1].k.copy_(pair[0].k)
        pair[1].v.copy_(pair[0].v)
        for side, cache in zip(caches, pair, strict=True):
            side.append(cache)
    x = torch.randn(sum(rows), HIDDEN, generator=generator).bfloat16()
    expected = one_by_one(x.clone(), layers, positions, cos_sin, caches[0], meta)
    actual = fused(x, positions, cos_sin, caches[1], [meta] * len(layers))
    assert actual is not None
    assert actual[0].isfinite().all()
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    for left, right in zip(*caches, strict=True):
        assert torch.equal(left.k, right.k)
        assert torch.equal(left.v, right.v)


STEPS = [([1], [5]), ([1], [700]), ([1, 1, 1], [3, 17, 600]), ([1] * 7, [20] * 7), ([1, 1, 9, 40], [8, 30, 9, 90])]


@needs_kernels
@pytest.mark.parametrize("kind", ["dense", "4s", "4m", "8s", "8a"])
@pytest.mark.parametrize(("rows", "lengths"), STEPS)
def test_fused_layers_give_the_same_bits(kind: str, rows: list[int], lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    compare([make_layer(kind, generator) for _ in range(3)], rows, lengths, generator)


@needs_kernels
@pytest.mark.parametrize(("rows", "lengths"), STEPS[1:])
def test_biases_head_norms_windows_and_gelu(rows: list[int], lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(20)

    def vector(n: int) -> Tensor:
        return torch.randn(n, generator=generator).bfloat16()

    changes = {
        "qkv_bias": vector((HEADS + 2 * KV_HEADS) * D),
        "output_bias": vector(HIDDEN),
        "gate_up_bias": vector(2 * INNER),
        "down_bias": vector(HIDDEN),
        "q_norm": vector(D),
        "k_norm": vector(D),
        "window": 20,
        "softcap": 3.0,
        "activation": "gelu_tanh",
    }
    compare([make_layer("dense", generator, **changes) for _ in range(2)], rows, lengths, generator)


@needs_kernels
def test_two_cache_groups() -> None:
    """Each layer follows the metadata of its own group."""
    generator = torch.Generator().manual_seed(21)
    layers = [make_layer("dense", generator), make_layer("dense", generator)]
    fused = ops.fuse_decoder(layers)
    assert fused is not None
    meta, positions, num_blocks = step_of([1, 1], [20, 33])
    other = replace(meta, block_table=meta.block_table.flip(0), slot_mapping=meta.slot_mapping.flip(0))
    other.seq_lens = meta.seq_lens.flip(0)
    angles = torch.arange(40)[:, None] * torch.rand(D // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    caches = [ops.KVCache.allocate(num_blocks, BLOCK, KV_HEADS, D, torch.bfloat16) for _ in layers]
    fused(torch.randn(2, HIDDEN, generator=generator).bfloat16(), positions, cos_sin, caches, [meta, other])
    for cache, group in zip(caches, (meta, other), strict=True):
        written = {int(slot) // BLOCK for slot in group.slot_mapping}
        assert {i for i in range(num_blocks) if cache.k[i].count_nonzero()} == written


@needs_kernels
def test_what_is_not_served_is_left_to_single_operations() -> None:
    generator = torch.Generator().manual_seed(22)
    layer = make_layer("dense", generator)
    assert ops.fuse_decoder([layer, replace(layer, activation="relu")]) is None
    assert ops.fuse_decoder([replace(layer, input_norm=layer.input_norm.float())]) is None
    assert ops.fuse_decoder([replace(layer, num_heads=4)]) is None
    plain = ops.pack_weight(torch.zeros(HIDDEN, INNER), torch.float32)
    assert ops.fuse_decoder([replace(layer, down=plain)]) is None
    fused = ops.fuse_decoder([layer])
    assert fused is not None
    meta, positions, num_blocks = step_of([1], [5])
    cache = ops.KVCache.allocate(num_blocks, BLOCK, KV_HEADS, D, torch.bfloat16, interleaved=False)
    x = torch.randn(1, HIDDEN, generator=generator).bfloat16()
    before = x.clone()
    assert fused(x, positions, torch.zeros(8, D), [cache], [meta]) is None
    assert torch.equal(x, before)
