"""Equal shares of a product for each program: stream-K (Osama et al., 2023).

The tiles of W, block of rows after block of rows, are one long list; program p of P multiplies those from p total / P
on. Where its stretch ends inside a block, it leaves the sums so far for the program of that block to arrive last, which
adds them in the order of the list. There may be no more programs than tiles: each that shares a block has to arrive.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def owner(tile, total, PROGRAMS: tl.constexpr):
    """The program whose stretch, from p * total // PROGRAMS on, holds a tile."""
    return ((tile + 1) * PROGRAMS - 1) // total


@triton.jit
def leave(
    gate, up, square_sum, norm, area, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tl.store(area + place, gate)
    if GATE is not None:
        tl.store(area + BLOCK_N * BLOCK_M + place, up)
    if norm is not None:
        tl.store(area + 2 * BLOCK_N * BLOCK_M + tl.arange(0, BLOCK_M), square_sum)


@triton.jit
def gather(
    norm, areas, first_program, last_program, first_slot,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """What the programs of a block left, added. Only the first of them can have had another block before."""
    SIZE: tl.constexpr = (2 * BLOCK_N + 1) * BLOCK_M
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    square_sum = tl.zeros([BLOCK_M], tl.float32)
    for program in range(first_program, last_program + 1):
        slot = tl.where(program == first_program, first_slot, 0)
        area = areas + (2 * program + slot) * SIZE
        gate += tl.load(area + place, cache_modifier=".cg")
        if GATE is not None:
            up += tl.load(area + BLOCK_N * BLOCK_M + place, cache_modifier=".cg")
        if norm is not None:
            square_sum += tl.load(area + 2 * BLOCK_N * BLOCK_M + tl.arange(0, BLOCK_M), cache_modifier=".cg")
    return gate, up, square_sum
