"""Products of few rows by programs with equal shares: stream-K (Osama et al., 2023), for weights in bf16.

The tiles of W, block of rows after block of rows, are one long list; each program multiplies an equal stretch of it, so
that no multiprocessor idles while others work off a last wave, and its loads never stop between two blocks. Where a
stretch ends inside a block, the sums so far are left for the program of that block to arrive last, which adds them in
the order of the list. All programs run at once; each asks for its first tiles while the kernel ahead still works.

See `linear.py` for what surrounds the product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import runtime
from octavo.ops.triton.gemv import LINE, prefetch, weight_tile
from octavo.ops.triton.linear import input_tile, multiply, norm_tile, write

if TYPE_CHECKING:
    from octavo.ops.triton.linear import Weight
    from octavo.ops.triton.runtime import Tile


@triton.jit
def _owner(tile, total, PROGRAMS: tl.constexpr):
    """The program whose stretch, from p * total // PROGRAMS on, holds a tile."""
    return ((tile + 1) * PROGRAMS - 1) // total


@triton.jit
def _leave(
    gate, up, square_sum, norm, area, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tl.store(area + place, gate)
    if GATE is not None:
        tl.store(area + BLOCK_N * BLOCK_M + place, up)
    if norm is not None:
        tl.store(area + 2 * BLOCK_N * BLOCK_M + tl.arange(0, BLOCK_M), square_sum)


@triton.jit
def _gather(
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


@triton.jit(do_not_specialize=["M"])
def stream_kernel(
    x, w, norm, bias, residual, out, partial, counters, M, N, eps,
    K: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """x [M, K] to out [M, N]; grid (PROGRAMS, blocks of M). LINES: lines of a row to ask for before the wait."""
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = K % BLOCK_K == 0
    SIZE: tl.constexpr = (2 * BLOCK_N + 1) * BLOCK_M
    blocks = tl.cdiv(N, BLOCK_N)
    total = blocks * TILES
    program = tl.program_id(0)
    begin, end = program * total // PROGRAMS, (program + 1) * total // PROGRAMS
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    areas = partial + tl.program_id(1).to(tl.int64) * (2 * PROGRAMS * SIZE)
    arrived = counters + tl.program_id(1) * blocks
    first = begin % TILES * BLOCK_K
    norm_factor = norm_tile(norm, first + tl.arange(0, BLOCK_K), K)
    if PDL:
        row = tl.minimum(begin // TILES * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
        prefetch(w, row, first * 2, K * 2, LINES * 128, LINES)
        if GATE is not None:
            prefetch(w, row + N, first * 2, K * 2, LINES * 128, LINES)
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for tile in range(begin, end):
        block = tile // TILES
        column = tile % TILES * BLOCK_K + tl.arange(0, BLOCK_K)
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.minimum(n, N - 1)
        next_norm = norm_tile(norm, (tile + 1) % TILES * BLOCK_K + tl.arange(0, BLOCK_K), K)
        value, square = input_tile(x, norm, norm_factor, m, column, M, K, EVEN)
        if norm is not None:
            squares += square
        gate = multiply(weight_tile(w, row, column, K, EVEN), value, gate, NATIVE)
        if GATE is not None:
            up = multiply(weight_tile(w, row + N, column, K, EVEN), value, up, NATIVE)
        norm_factor = next_norm
        is_end = tile % TILES == TILES - 1
        if is_end or tile == end - 1:
            square_sum = tl.sum(squares, axis=1)
            if is_end and tile - TILES + 1 >= begin:
                write(
                    gate, up, square_sum, None, None, norm, bias, residual, out, m, n, M, N, eps, K, 1, "bf16", GATE
                )  # fmt: skip
            else:
                slot = tl.where(block == begin // TILES, 0, 1)
                _leave(gate, up, square_sum, norm, areas + (2 * program + slot) * SIZE, BLOCK_M, BLOCK_N, GATE)
            gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    # What was left is added here: the compiler would not overlap the loads of a loop that synchronizes.
    tl.debug_barrier()  # the stores of all threads come before the one thread's release
    for slot in range(2):
        block = begin // TILES if slot == 0 else (end - 1) // TILES
        first_tile = block * TILES
        is_whole = begin <= first_tile and first_tile + TILES <= end
        if not is_whole and (slot == 0 or block != begin // TILES):
            first_program = _owner(first_tile, total, PROGRAMS)
            last_program = _owner(first_tile + TILES - 1, total, PROGRAMS)
            if tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu") == last_program - first_program:
                tl.store(arrived + block, 0)  # for the next product
                first_slot = tl.where(first_program * total // PROGRAMS < first_tile, 1, 0)
                gate, up, square_sum = _gather(
                    norm, areas, first_program, last_program, first_slot, BLOCK_M, BLOCK_N, GATE
                )
                n = block * BLOCK_N + tl.arange(0, BLOCK_N)
                write(
                    gate, up, square_sum, None, None, norm, bias, residual, out, m, n, M, N, eps, K, 1, "bf16", GATE
                )  # fmt: skip


def stream(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    norm: Tensor | None,
    eps: float,
    gate: str | None,
    residual: Tensor | None,
    tile: Tile,
) -> Tensor:
    """`linear.few_rows` for a tile whose split is -p: p programs on each multiprocessor."""
    if weight.kind != "bf16":
        raise ValueError(f"tile {tuple(tile)}: equal shares are for bf16 weights, not {weight.kind}; use a split > 0")
    rows, k = x.shape
    n = weight.shape[0] if gate is None else weight.shape[0] // 2
    blocks, row_blocks = triton.cdiv(n, tile.n), triton.cdiv(rows, tile.rows)
    block_k = min(tile.k, triton.next_power_of_2(k))
    # no share is empty: the kernel counts every program between the first and the last of a block
    programs = min(-tile.split * runtime.num_multiprocessors(x.device), blocks * triton.cdiv(k, block_k))
    out = torch.empty((rows, n), dtype=out_dtype, device=x.device)
    size = row_blocks * programs * 2 * (2 * tile.n + 1) * tile.rows
    partial = torch.empty(size, dtype=torch.float32, device=x.device)
    pdl = runtime.uses_dependent_launch(x.device)
    stages = runtime.stages(tile, block_k, "bf16", k, False, gate is not None)
    lines = triton.next_power_of_2(max(1, stages * block_k * 2 // LINE.value))
    stream_kernel[(programs, row_blocks)](
        x, weight.data, norm, bias, residual, out, partial, runtime.counters(x.device, blocks * row_blocks),
        rows, n, eps, k, gate, tile.rows, tile.n, block_k, programs, lines, pdl, runtime.is_native(),
        num_warps=tile.warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    return out
