"""8-bit products by programs with equal shares of the work: stream-K (Osama et al., 2023), for up to some hundred rows.

The tiles of W, block of y after block of y, are one long list; one program a multiprocessor multiplies an equal stretch
of it, so that none idles while others work off a last wave, and tiles may be as large as the matrix units like them.
Where a stretch ends inside a block of y, its sums are left in memory; the programs of that block wait for each other,
and then each adds the sums of all, in the order of the list, for some of the block's columns.

See `linear_8bit.py` for what a product is. Waiting needs all programs to run at once, hence one a multiprocessor.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.ops.triton import runtime
from octavo.ops.triton.linear_8bit_parts import column_factors, finish, prefetch_rows
from octavo.ops.triton.runtime import Tile


@triton.jit
def _owner(tile, total, programs):
    """The program whose stretch, from p * total // programs on, holds a tile."""
    return ((tile + 1) * programs - 1) // total


@triton.jit
def _slot(program, block, total, programs, TILES: tl.constexpr):
    """Where a program leaves the sums of a block: 0 where its stretch begins in it, 1 where it has one before."""
    return tl.where(program * total // programs < block * TILES, 1, 0)


@triton.jit
def _arrive(counters, program, block, total, programs, TILES: tl.constexpr):
    """(programs of a block, which of them this one is, how many were here before it)."""
    first = _owner(block * TILES, total, programs)
    parts = _owner(block * TILES + TILES - 1, total, programs) - first + 1
    before = tl.zeros([], tl.int32)
    if parts > 1:
        before = tl.atomic_add(counters + block, 1, sem="acq_rel", scope="gpu")
    return parts, program - first, before


@triton.jit
def _add_up(
    block, parts, mine, before, scale, w_scale, bias, residual, out, partial, counters, M, N, blocks_m, total, programs,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, MOST: tl.constexpr,
    CHUNKS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """This program's share of adding what all programs of a block left.

    Under the interpreter programs run one after another: the last one takes all shares.
    """
    WIDTH: tl.constexpr = BLOCK_N // CHUNKS
    counter = counters + block
    if NATIVE:
        while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < parts:
            pass
        begin, step = mine, parts
    else:
        begin, step = tl.where(before == parts - 1, 0, CHUNKS), 1
    row = tl.arange(0, BLOCK_M)
    m = block % blocks_m * BLOCK_M + row
    factor = tl.load(scale + m, mask=m < M, other=0)
    first = block * TILES
    first_program = _owner(first, total, programs)
    for chunk in range(begin, CHUNKS, step):
        column = chunk * WIDTH + tl.arange(0, WIDTH)
        n = block // blocks_m * BLOCK_N + column
        w_factor, shift = column_factors(w_scale, bias, n, N)
        inside = (m < M)[:, None] & (n < N)[None, :]
        whole = tl.zeros([BLOCK_M, WIDTH], SUM)
        for part in tl.static_range(MOST):
            program = first_program + part
            area = 2 * program + _slot(program, block, total, programs, TILES)
            place = area.to(tl.int64) * (BLOCK_M * BLOCK_N) + row[:, None] * BLOCK_N + column[None, :]
            whole += tl.load(partial + place, mask=inside & (part < parts), other=0, cache_modifier=".cg")
        finish(whole, factor, w_factor, shift, residual, out, m, n, M, N)
    if NATIVE:
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == 2 * parts - 1:
            tl.store(counter, 0)  # the last to leave, for the next product
    elif before == parts - 1:
        tl.store(counter, 0)


@triton.jit
def _put(
    y, is_whole, area, scale, w_scale, bias, residual, out, first_m, first_n, column, M, N, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Finish some columns of a block of sums, or leave them in its area if they are not all of the sums."""
    here, across = tl.arange(0, y.shape[0]), column + tl.arange(0, y.shape[1])
    m, n = first_m + here, first_n + across
    if is_whole:
        factor = tl.load(scale + m, mask=m < M, other=0)
        w_factor, shift = column_factors(w_scale, bias, n, N)
        finish(y, factor, w_factor, shift, residual, out, m, n, M, N)
    else:
        inside = (m < M)[:, None] & (n < N)[None, :]
        tl.store(area + here[:, None] * BLOCK_N + across[None, :], y, mask=inside)


@triton.jit(do_not_specialize=["M", "blocks_m", "total"])
def shares_kernel(
    codes, scale, w, w_pointer, w_scale, bias, residual, out, partial, counters, M, N, blocks_m, total,
    K: tl.constexpr, SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MOST: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """codes [M, K] times w [N, K], both tensor descriptors, to out [M, N].

    total: tiles of all blocks. MOST: programs that share a block, at most. AHEAD: bytes of a row of w to ask for early.
    """
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    program, programs = tl.program_id(0), tl.num_programs(0)
    begin, end = program * total // programs, (program + 1) * total // programs
    if PDL:
        early = tl.minimum(begin // TILES // blocks_m * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
        prefetch_rows(w_pointer, early, begin % TILES * BLOCK_K, K, AHEAD)
        gdc_wait()
        gdc_launch_dependents()
    if BLOCK_M < 64:  # the few rows are the small operand of the matrix units, and W the one that is padded to 64
        sums = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_N], SUM)
    for tile in range(begin, end):
        block = tile // TILES
        column = tile % TILES * BLOCK_K
        weight = w.load([block // blocks_m * BLOCK_N, column])
        x = codes.load([block % blocks_m * BLOCK_M, column])
        if BLOCK_M < 64:
            sums = tl.dot(weight, x.T, sums, out_dtype=SUM)
        else:
            sums = tl.dot(x, weight.T, sums, out_dtype=SUM)
        is_end = column + BLOCK_K >= K
        if is_end or tile == end - 1:
            y = tl.trans(sums) if BLOCK_M < 64 else sums
            slot = _slot(program, block, total, programs, TILES)
            area = partial + (2 * program + slot).to(tl.int64) * (BLOCK_M * BLOCK_N)
            is_whole = is_end and tile - TILES + 1 >= begin
            first_m, first_n = block % blocks_m * BLOCK_M, block // blocks_m * BLOCK_N
            if BLOCK_M * BLOCK_N < 32768:
                _put(
                    y, is_whole, area, scale, w_scale, bias, residual, out, first_m, first_n, 0, M, N, BLOCK_N
                )  # fmt: skip
            else:  # in halves, which need less shared memory and fewer registers
                HALF: tl.constexpr = BLOCK_N // 2
                left, right = tl.split(tl.permute(tl.reshape(y, [BLOCK_M, 2, HALF]), [0, 2, 1]))
                _put(
                    left, is_whole, area, scale, w_scale, bias, residual, out, first_m, first_n, 0, M, N, BLOCK_N
                )  # fmt: skip
                _put(
                    right, is_whole, area, scale, w_scale, bias, residual, out, first_m, first_n, HALF, M, N, BLOCK_N
                )  # fmt: skip
            sums = tl.zeros_like(sums)
    if MOST > 1 and begin < end:
        tl.debug_barrier()  # all threads have written before one of them says so
        head, tail = begin // TILES, (end - 1) // TILES
        head_parts, head_mine, head_before = _arrive(counters, program, head, total, programs, TILES)
        tail_parts, tail_mine, tail_before = head_parts * 0 + 1, head_mine, head_before
        if tail != head:
            tail_parts, tail_mine, tail_before = _arrive(counters, program, tail, total, programs, TILES)
        if head_parts > 1:
            _add_up(
                head, head_parts, head_mine, head_before, scale, w_scale, bias, residual, out, partial, counters, M, N,
                blocks_m, total, programs, SUM, BLOCK_M, BLOCK_N, TILES, MOST, CHUNKS, NATIVE,
            )  # fmt: skip
        if tail_parts > 1:
            _add_up(
                tail, tail_parts, tail_mine, tail_before, scale, w_scale, bias, residual, out, partial, counters, M, N,
                blocks_m, total, programs, SUM, BLOCK_M, BLOCK_N, TILES, MOST, CHUNKS, NATIVE,
            )  # fmt: skip


@functools.cache
def most_parts(blocks: int, tiles: int, programs: int) -> int:
    """Programs that share a block of `tiles` tiles, at most, where `programs` have equal stretches of `blocks`."""
    total = blocks * tiles
    ends = ((block * tiles, block * tiles + tiles - 1) for block in range(blocks))
    return max(((last + 1) * programs - 1) // total - ((first + 1) * programs - 1) // total + 1 for first, last in ends)


class Division(NamedTuple):
    """How the work of a product is divided: tiles of W are `block_k` bytes of a row wide."""

    block_k: int
    blocks_m: int
    blocks: int
    tiles: int  # of a block
    programs: int
    most: int  # programs that share a block, at most
    chunks: int  # of a block's columns, shared out when sums are added


@functools.cache
def divide(rows: int, n: int, k: int, tile: Tile, multiprocessors: int) -> Division:
    """The division for codes [rows, k] and weight [n, k]."""
    block_k = min(tile.k, triton.next_power_of_2(k))
    blocks_m, tiles = triton.cdiv(rows, tile.rows), triton.cdiv(k, block_k)
    blocks = blocks_m * triton.cdiv(n, tile.n)
    programs = min(multiprocessors, blocks * tiles)
    most = most_parts(blocks, tiles, programs)
    most += most % 2 if most > 1 else 0  # fewer kernels to compile
    chunks = min(triton.next_power_of_2(most + 1), tile.n // 16)
    return Division(block_k, blocks_m, blocks, tiles, programs, most, chunks)


def launch_shares(
    codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    tile: Tile,
) -> None:  # fmt: skip
    """The operands of `linear_8bit`; tile.split says only that this kernel is meant."""
    (rows, k), n = codes.shape, w.shape[0]
    sums, dtype = (tl.int32, torch.int32) if codes.dtype == torch.int8 else (tl.float32, torch.float32)
    of = divide(rows, n, k, tile, runtime.num_multiprocessors(codes.device))
    size = 2 * of.programs * tile.rows * tile.n if of.most > 1 else 0
    partial = torch.empty(size, dtype=dtype, device=codes.device)
    pdl = runtime.uses_dependent_launch(codes.device)
    shares_kernel[(of.programs,)](
        TensorDescriptor(codes, [rows, k], [k, 1], [tile.rows, of.block_k]), scale,
        TensorDescriptor(w, [n, k], [k, 1], [tile.n, of.block_k]), w, w_scale, bias, residual, out, partial,
        runtime.counters(codes.device, of.blocks), rows, n, of.blocks_m, of.blocks * of.tiles, k, sums,
        tile.rows, tile.n, of.block_k, of.most, of.chunks, tile.stages * of.block_k, pdl, runtime.is_native(),
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
