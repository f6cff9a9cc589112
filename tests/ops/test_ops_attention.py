"""Paged cache and attention: layouts, the reference against torch, kernels against the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import ops
from octavo.ops import reference
from octavo.ops.cpu import library

needs_kernels = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))


@dataclass
class Batch:
    """Requests with `rows` new tokens each at the end of `lengths`, in shuffled blocks."""

    rows: list[int]
    lengths: list[int]
    block_size: int
    table: Tensor
    num_blocks: int

    @classmethod
    def make(cls, rows: list[int], lengths: list[int], block_size: int, generator: torch.Generator) -> Batch:
        counts = [-(-length // block_size) for length in lengths]
        free = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
        for s, count in enumerate(counts):
            table[s, :count] = torch.tensor([free.pop() for _ in range(count)])
        return cls(rows, lengths, block_size, table, sum(counts) + 1)

    def slots(self, first: list[int], last: list[int]) -> Tensor:
        pairs = [(s, j) for s in range(len(self.rows)) for j in range(first[s], last[s])]
        slots = [int(self.table[s, j // self.block_size]) * self.block_size + j % self.block_size for s, j in pairs]
        return torch.tensor(slots, dtype=torch.int64)

    def starts(self) -> list[int]:
        return [length - rows for rows, length in zip(self.rows, self.lengths, strict=True)]

    def meta(self, slots: Tensor, table: Tensor) -> ops.AttentionMetadata:
        query_start = torch.tensor([0, *torch.tensor(self.rows).cumsum(0).tolist()], dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        decodes = next((i for i, rows in enumerate(self.rows) if rows > 1), len(self.rows))
        return ops.AttentionMetadata(query_start, lengths, table, slots, max(self.rows), max(self.lengths), decodes)

    def context_meta(self) -> ops.AttentionMetadata:
        return self.meta(self.slots([0] * len(self.rows), self.starts()), self.table)

    def step_meta(self, window: int | None = None) -> ops.AttentionMetadata:
        """The step's metadata; blocks that slid out of the window are null."""
        table = self.table.clone()
        if window is not None:
            for s, start in enumerate(self.starts()):
                table[s, : max(0, start - window + 1) // self.block_size] = 0
        return self.meta(self.slots(self.starts(), self.lengths), table)

    def positions(self) -> Tensor:
        starts = self.starts()
        return torch.tensor([j for s in range(len(self.rows)) for j in range(starts[s], self.lengths[s])])


def poisoned_cache(batch: Batch, heads: int, head_dim: int, dtype: torch.dtype, **kwargs: bool) -> ops.KVCache:
    """A cache whose unwritten slots hold NaN: reading one, even with weight 0, shows."""
    cache = ops.KVCache.allocate(batch.num_blocks, batch.block_size, heads, head_dim, dtype, **kwargs)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("interleaved", [False, True])
def test_scatter_then_gather(interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = Batch.make([1], [37], 16, generator)
    cache = poisoned_cache(batch, 2, 32, torch.float32, interleaved=interleaved)
    assert (cache.block_size, cache.head_dim, cache.num_kv_heads, cache.num_blocks) == (16, 32, 2, 4)
    k, v = torch.randn(2, 37, 2, 32, generator=generator)
    ops.store_kv(k, v, cache, batch.meta(batch.slots([0], [37]), batch.table))
    k_out, v_out = cache.gather(batch.table[0].long())
    assert torch.equal(k_out[:, :37], k.transpose(0, 1))
    assert torch.equal(v_out[:, :37], v.transpose(0, 1))


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("interleaved", [False, True])
def test_reference_attention_is_torchs(window: int | None, interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = Batch.make([1, 1, 20], [1, 50, 60], 16, generator)
    heads, kv_heads, d = 6, 2, 32
    cache = poisoned_cache(batch, kv_heads, d, torch.float32, interleaved=interleaved)
    k, v = torch.randn(2, sum(batch.lengths), kv_heads, d, generator=generator)
    ops.store_kv(k, v, cache, batch.meta(batch.slots([0, 0, 0], batch.lengths), batch.table))
    q = torch.randn(sum(batch.rows), heads, d, generator=generator)
    out = ops.paged_attention(q, cache, batch.step_meta(window), 0.3, window)
    first_row = first_key = 0
    for rows, length in zip(batch.rows, batch.lengths, strict=True):
        keys = slice(first_key, first_key + length)
        query, key = torch.arange(length - rows, length)[:, None], torch.arange(length)[None]
        mask = (key <= query) & (key > query - (window or length + 1))
        expected = F.scaled_dot_product_attention(
            q[first_row : first_row + rows].transpose(0, 1),
            k[keys].transpose(0, 1).repeat_interleave(3, 0),
            v[keys].transpose(0, 1).repeat_interleave(3, 0),
            attn_mask=mask,
            scale=0.3,
        )
        torch.testing.assert_close(
            out[first_row : first_row + rows], expected.transpose(0, 1).flatten(1), rtol=1e-4, atol=1e-5
        )
        first_row, first_key = first_row + rows, first_key + length


def test_softcap_and_sinks_in_closed_form() -> None:
    generator = torch.Generator().manual_seed(2)
    batch = Batch.make([1], [3], 16, generator)
    cache = poisoned_cache(batch, 1, 16, torch.float32)
    k, v = torch.randn(2, 3, 1, 16, generator=generator)
    ops.store_kv(k, v, cache, batch.meta(batch.slots([0], [3]), batch.table))
    q, sink = torch.randn(1, 1, 16, generator=generator), torch.tensor([0.7])
    scores = 1.5 * torch.tanh((k[:, 0] @ q[0, 0]) * 0.25 / 1.5)
    weights = scores.exp() / (scores.exp().sum() + sink.exp())
    out = ops.paged_attention(q, cache, batch.step_meta(), 0.25, None, 1.5, sink)
    torch.testing.assert_close(out[0], weights @ v[:, 0])


def random_case(seed: int) -> None:
    """Rotary, store and attention of a random step: kernels in bfloat16 against the reference in float32."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    d = choose.choice((32, 64, 80, 96, 128))
    kv_heads, group, block_size = choose.choice((1, 2, 3)), choose.randint(1, 8), choose.choice((8, 16, 32, 48))
    heads = kv_heads * group
    decodes, prefills = choose.choice((0, 1, 3)), choose.choice((0, 1, 2))
    rows = [1] * decodes + [choose.randint(1, 90) for _ in range(prefills)] or [5]
    lengths = [r + choose.choice((0, 0, 7, 50, 300, 1200)) for r in rows]
    window, softcap = choose.choice((None, None, 5, 37, 600)), choose.choice((None, 2.0))
    sinks = torch.randn(heads, generator=generator) if choose.random() < 0.3 else None
    batch = Batch.make(rows, lengths, block_size, generator)
    cache = poisoned_cache(batch, kv_heads, d, torch.bfloat16)
    exact = poisoned_cache(batch, kv_heads, d, torch.float32)

    k, v = torch.randn(2, sum(batch.starts()), kv_heads, d, generator=generator).bfloat16()
    ops.store_kv(k, v, cache, batch.context_meta())
    reference.store_kv(k.float(), v.float(), exact, batch.context_meta())

    qkv = torch.randn(sum(rows), (heads + 2 * kv_heads) * d, generator=generator).bfloat16()
    rotary = choose.choice((d, d // 2, 8))
    angles = torch.arange(max(lengths))[:, None] * torch.rand(rotary // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    norms = [torch.randn(d, generator=generator).bfloat16() if choose.random() < 0.5 else None for _ in range(2)]
    pairs = choose.random() < 0.3
    meta = batch.step_meta(window)
    shape = (heads, kv_heads, d)
    q = ops.rotary_and_store(qkv, batch.positions(), cos_sin, cache, meta, *shape, *norms, 1e-5, pairs)
    norms = [None if norm is None else norm.float() for norm in norms]
    q_exact = reference.rotary_and_store(
        qkv.float(), batch.positions(), cos_sin, exact, meta, *shape, norms[0], norms[1], 1e-5, pairs
    )
    assert relative_error(q, q_exact) < 6e-3
    out = ops.paged_attention(q, cache, meta, d**-0.5, window, softcap, sinks)
    same_inputs = reference.paged_attention(q, cache, meta, d**-0.5, window, softcap, sinks)
    assert relative_error(out, same_inputs) < 6e-3
    from_float32 = reference.paged_attention(q_exact, exact, meta, d**-0.5, window, softcap, sinks)
    assert relative_error(out, from_float32) < 2e-2


@needs_kernels
@pytest.mark.parametrize("seed", range(40))
def test_kernels_are_the_reference(seed: int) -> None:
    random_case(seed)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 400))
def test_kernels_are_the_reference_on_many_shapes(seed: int) -> None:
    random_case(seed)


@needs_kernels
def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Tiles and cuts follow positions only: a decode alone and among others gives the same bits."""
    generator = torch.Generator().manual_seed(3)
    batch = Batch.make([1, 1, 1], [700, 1300, 40], 16, generator)
    cache = poisoned_cache(batch, 3, 64, torch.bfloat16)
    k, v = torch.randn(2, sum(batch.lengths), 3, 64, generator=generator).bfloat16()
    ops.store_kv(k, v, cache, batch.meta(batch.slots([0] * 3, batch.lengths), batch.table))
    q = torch.randn(3, 9, 64, generator=generator).bfloat16()
    together = ops.paged_attention(q, cache, batch.step_meta(), 0.125)
    for s in range(3):
        alone = Batch([1], [batch.lengths[s]], 16, batch.table[s : s + 1], batch.num_blocks)
        assert torch.equal(ops.paged_attention(q[s : s + 1], cache, alone.step_meta(), 0.125)[0], together[s])


@needs_kernels
def test_a_nan_stays_in_its_request() -> None:
    generator = torch.Generator().manual_seed(4)
    batch = Batch.make([1, 9], [33, 41], 16, generator)
    cache = poisoned_cache(batch, 1, 32, torch.bfloat16)
    k, v = torch.randn(2, sum(batch.lengths), 1, 32, generator=generator).bfloat16()
    k[5] = v[5] = float("nan")  # of the first request
    ops.store_kv(k, v, cache, batch.meta(batch.slots([0, 0], batch.lengths), batch.table))
    q = torch.randn(10, 2, 32, generator=generator).bfloat16()
    out = ops.paged_attention(q, cache, batch.step_meta(), 0.2)
    assert out[0].isnan().all()
    assert not out[1:].isnan().any()


@needs_kernels
def test_layout_follows_the_kernel() -> None:
    assert ops.KVCache.allocate(2, 16, 1, 64, torch.bfloat16).interleaved
    assert not ops.KVCache.allocate(2, 16, 1, 64, torch.float32).interleaved
    assert not ops.KVCache.allocate(2, 8, 1, 64, torch.bfloat16).interleaved
    assert not ops.KVCache.allocate(2, 16, 1, 72, torch.bfloat16).interleaved


@needs_kernels
@pytest.mark.parametrize("head_dim", [72, 64])
def test_what_the_kernel_does_not_cover_goes_to_torch(head_dim: int) -> None:
    """A head of 72 channels is no whole number of vectors; 60 query heads a key head do not fit in a tile."""
    generator = torch.Generator().manual_seed(5)
    heads = 2 if head_dim == 72 else 60
    batch = Batch.make([1, 4], [20, 30], 16, generator)
    cache = poisoned_cache(batch, 1, head_dim, torch.bfloat16)
    k, v = torch.randn(2, 50, 1, head_dim, generator=generator).bfloat16()
    ops.store_kv(k, v, cache, batch.meta(batch.slots([0, 0], batch.lengths), batch.table))
    q = torch.randn(5, heads, head_dim, generator=generator).bfloat16()
    out = ops.paged_attention(q, cache, batch.step_meta(), 0.1)
    assert torch.equal(out, reference.paged_attention(q, cache, batch.step_meta(), 0.1, None, None, None))


def test_metadata_of_the_wrong_type_is_an_error() -> None:
    generator = torch.Generator().manual_seed(6)
    batch = Batch.make([1], [5], 16, generator)
    with pytest.raises(TypeError, match="int32"):
        batch.meta(batch.slots([4], [5]).int(), batch.table)
    with pytest.raises(ValueError, match="contiguous"):
        batch.meta(batch.slots([4], [5]), torch.zeros(4, 1, dtype=torch.int32).expand(4, 2)[:1])
