"""Products of routed rows with their experts' weights, grouped so that rows of one expert share what is read of it.

The rows of a step are sorted by expert, each expert's padded to whole tiles; a program takes one tile of rows and one
of outputs. How many tiles there are is known to the device alone: the grid is the most there can be, and a program
without rows ends at once, so that nothing waits for the device and a step can be captured as a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N, BLOCK_K = 64, 64


def sort_rows(ids: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Pairs of row and place by expert, from ids [T, K]: the order [tiles * block], and each tile's expert [tiles].

    An entry of the order is an index into the flattened ids; -1 where a tile is not full. The expert of a tile without
    rows is -1.
    """
    flat = ids.flatten()
    pairs = flat.numel()
    tiles = min(pairs, num_experts + pairs // block)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))
    ends = ((counts + block - 1) // block).cumsum(0)  # in tiles
    sorted_ids, order = flat.sort(stable=True)
    first_row = counts.cumsum(0) - counts
    first_tile = ends - (counts + block - 1) // block
    inside = torch.arange(pairs, device=ids.device) - first_row[sorted_ids]
    padded = torch.full((tiles * block,), -1, dtype=torch.int64, device=ids.device)
    padded[first_tile[sorted_ids] * block + inside] = order
    tile = torch.arange(tiles, device=ids.device)
    owner = torch.searchsorted(ends, tile, right=True)
    return padded, torch.where(tile < ends[-1], owner, -1)


@triton.jit
def _grouped(
    x, w, scale, offset, order, owners, shares, out, n, k, divisor, groups,
    BITS: tl.constexpr, HAS_OFFSET: tl.constexpr, WEIGHED: tl.constexpr,
    BLOCK_M: tl.constexpr, N_TILE: tl.constexpr, K_TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // divisor] W[expert]^T, times shares[pair] where WEIGHED; BITS 16: dense, 8 or 4: codes."""
    expert = tl.load(owners + tl.program_id(0))
    if expert >= 0:
        pairs = tl.load(order + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
        is_row = pairs >= 0
        columns = tl.program_id(1) * N_TILE + tl.arange(0, N_TILE)
        is_column = columns < n
        rows_of_w = expert * n + columns
        total = tl.zeros((BLOCK_M, N_TILE), dtype=tl.float32)
        for start in range(0, k, K_TILE):
            inner = start + tl.arange(0, K_TILE)
            is_inner = inner < k
            left = tl.load(
                x + (pairs // divisor)[:, None] * k + inner[None], mask=is_row[:, None] & is_inner[None], other=0.0
            )
            is_weight = is_column[:, None] & is_inner[None]
            if BITS == 4:
                byte = tl.load(w + rows_of_w[:, None] * (k // 2) + inner[None] // 2, mask=is_weight, other=0)
                right = ((byte >> (4 * (inner[None] % 2)).to(tl.uint8)) & 15).to(tl.float32)
            else:
                right = tl.load(w + rows_of_w[:, None] * k + inner[None], mask=is_weight, other=0.0).to(tl.float32)
            if BITS < 16:
                place = rows_of_w[:, None] * groups + inner[None] // GROUP
                right = right * tl.load(scale + place, mask=is_weight, other=0.0).to(tl.float32)
                if HAS_OFFSET:
                    right += tl.load(offset + place, mask=is_weight, other=0.0).to(tl.float32)
            total = tl.dot(left, right.to(left.dtype).T, total, input_precision="ieee")
        if WEIGHED:
            total *= tl.load(shares + pairs, mask=is_row, other=0.0)[:, None]
        place = pairs[:, None] * n + columns[None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None])


def grouped(
    x: Tensor, w: Tensor, scale: Tensor | None, offset: Tensor | None,
    tiles: tuple[Tensor, Tensor], shares: Tensor | None, num_pairs: int, divisor: int,
) -> Tensor:  # fmt: skip
    """The product of each pair with its expert's weight: x [num_pairs / divisor, K] -> [num_pairs, N] in x's dtype.

    w: [E, N, K], or uint8 [E, N, K / 2] of 4-bit codes; scale and offset [E, N, G] where w holds codes. tiles: of
    `sort_rows`. shares: float32 [num_pairs], what multiplies each result.
    """
    order, owners = tiles
    n, k = w.shape[1], x.shape[1]
    bits = 16 if scale is None else 8 * w.shape[2] // k
    groups = 1 if scale is None else scale.shape[2]
    out = torch.empty(num_pairs, n, dtype=x.dtype, device=x.device)
    grid = (owners.numel(), triton.cdiv(n, BLOCK_N))
    _grouped[grid](
        x, w, scale, offset, order, owners, shares, out, n, k, divisor, groups,
        BITS=bits, HAS_OFFSET=offset is not None, WEIGHED=shares is not None,
        BLOCK_M=order.numel() // owners.numel(), N_TILE=BLOCK_N, K_TILE=BLOCK_K, GROUP=k // groups,
    )  # fmt: skip
    return out
