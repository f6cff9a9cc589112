"""Random steps over shuffled pages for the tests of attention, rotary and the store."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import ops
from octavo.ops import reference

# Triton's interpreter cuts bfloat16 off where a GPU rounds to the nearest, and cannot multiply matrices of it.
TOLERANCE = 6e-3 if torch.cuda.is_available() else 1e-2
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


class Step:
    """Requests with `rows` new tokens each at the end of contexts of `lengths`; decodes (one row) come first.

    The cache's unwritten slots hold NaN: reading one, even with weight 0, shows. A request of length 0 is padding.
    """

    def __init__(
        self,
        rows: list[int],
        lengths: list[int],
        block_size: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype = HALF,
        cache_dtype: torch.dtype | None = None,
        seed: int = 0,
        window: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // block_size) for length in lengths]
        free = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        table = torch.zeros(len(rows), max(max(counts), 1), dtype=torch.int32)
        for s, count in enumerate(counts):
            table[s, :count] = torch.tensor([free.pop() for _ in range(count)])
        self.rows, self.lengths = rows, lengths
        starts = [max(length - n, 0) for length, n in zip(lengths, rows, strict=True)]
        owners = [(s, j) for s, n in enumerate(rows) for j in range(starts[s], starts[s] + n)]
        slots = [int(table[s, j // block_size]) * block_size + j % block_size if lengths[s] else -1 for s, j in owners]
        self.positions = torch.tensor([j for _, j in owners], device=device)
        written = [(s, j) for s, n in enumerate(lengths) for j in range(n)]
        all_slots = [int(table[s, j // block_size]) * block_size + j % block_size for s, j in written]
        shape = (sum(counts) + 1, kv_heads, block_size, head_dim)
        nan = torch.full(shape, float("nan"))
        self.cache = ops.KVCache(*(nan.to(cache_dtype or dtype).to(device) for _ in range(2)), interleaved=False)
        k, v = torch.randn(2, len(written), kv_heads, head_dim, generator=generator).to(dtype).to(device)
        self.cache.scatter(torch.tensor(all_slots, dtype=torch.int64, device=device), k, v)
        if window is not None:  # blocks that slid out of the window are given away
            for s, start in enumerate(starts):
                table[s, : max(0, start - window + 1) // block_size] = 0
        self.meta = ops.AttentionMetadata(
            torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            table.to(device),
            torch.tensor(slots, dtype=torch.int64, device=device),
            max(rows),
            max(lengths),
            next((i for i, n in enumerate(rows) if n > 1), len(rows)),
        )

    @property
    def num_rows(self) -> int:
        return sum(self.rows)


def exact_attention(
    q: Tensor,
    step: Step,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The reference in float32 on the values that the cache holds."""
    cache = ops.KVCache(step.cache.k.float(), step.cache.v.float(), interleaved=False)
    return reference.paged_attention(q.float(), cache, step.meta, scale, window, softcap, sinks)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())
