"""Products of many int8 rows and int8 weights on Hopper, where a tile's product runs while the next one is started.

Triton's compiler waits for every tile of an int8 product before it asks for the next: its pipeliner keeps only sums of
float32 in flight. Gluon, the layer below, leaves the waiting to the kernel: here the products of one tile of K stay in
flight, and the place of the tile before them is filled again meanwhile. Sums of integers do not depend on the order,
so the result is bit by bit that of `linear_8bit.many_rows_kernel`.

A program walks over every num_programs-th tile of y as one sequence of tiles of K, so that loads of the next tile of y
run during the epilogue of this one. `STAGES` places of shared memory form a ring: TMA fills a place and then completes
its barrier, whose phase is the parity of the rounds.

Gluon is experimental and changes from one release of Triton to the next: `has_async` says where it serves.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import runtime
from octavo.ops.triton.linear_8bit_parts import ASYNC_COLUMNS, GROUP
from octavo.ops.triton.runtime import Tile

BLOCK_K = ASYNC_COLUMNS  # bytes of a row that TMA lays out in one piece, for matrix units to read without conflicts


@gluon.jit
def _corner(step, first, programs, blocks_m, blocks_n, TILES: gl.constexpr, GROUP: gl.constexpr):
    """The block of rows and the block of columns of y that a step of this program works on."""
    tile = first + step // TILES * programs
    group = tile // (GROUP * blocks_n)
    height = gl.minimum(blocks_m - group * GROUP, GROUP)
    inner = tile % (GROUP * blocks_n)
    return group * GROUP + inner % height, inner // height


@gluon.jit
def _fetch(
    codes, w, filled, x_ring, w_ring, step, steps, first, programs, blocks_m, blocks_n,
    TILES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Asks for both operands of a step, unless it is behind the last one."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    block_m, block_n = _corner(step, first, programs, blocks_m, blocks_n, TILES, GROUP)
    place, column, live = step % STAGES, step % TILES * BLOCK_K, step < steps
    bar = filled.index(place)
    mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * BLOCK_K, pred=live)
    tma.async_copy_global_to_shared(codes, [block_m * BLOCK_M, column], bar, x_ring.index(place), pred=live)
    tma.async_copy_global_to_shared(w, [block_n * BLOCK_N, column], bar, w_ring.index(place), pred=live)


@gluon.jit
def _finish(total, scale, w_scale, bias, residual, out, first_m, first_n, M, N, WRITE: gl.constexpr):
    """As `linear_8bit_parts.finish`; WRITE: the layout in which a warp writes whole rows of a block."""
    BLOCK_M: gl.constexpr = total.shape[0]
    BLOCK_N: gl.constexpr = total.shape[1]
    m = first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, total.type.layout))
    n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, total.type.layout))
    y = total.to(gl.float32) * gl.load(w_scale + n, mask=n < N, other=0)[None, :]
    y = y * gl.load(scale + m, mask=m < M, other=0)[:, None]
    if bias is not None:
        y += gl.load(bias + n, mask=n < N, other=0).to(gl.float32)[None, :]
    y = gl.convert_layout(y.to(out.dtype.element_ty), WRITE)
    m = first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, WRITE))
    n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, WRITE))
    inside = (m < M)[:, None] & (n < N)[None, :]
    place = m.to(gl.int64)[:, None] * N + n[None, :]
    if residual is not None:
        y = (y.to(gl.float32) + gl.load(residual + place, mask=inside, other=0).to(gl.float32)).to(y.dtype)
    gl.store(out + place, y, mask=inside)


@gluon.jit(do_not_specialize=["M"])
def int8_kernel(
    codes, scale, w, w_scale, bias, residual, out, M, N,
    K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """codes [M, K] times w [N, K], both tensor descriptors, to out [M, N]; K a multiple of their blocks' columns."""
    BLOCK_M: gl.constexpr = codes.block_shape[0]
    BLOCK_N: gl.constexpr = w.block_shape[0]
    BLOCK_K: gl.constexpr = codes.block_shape[1]
    TILES: gl.constexpr = K // BLOCK_K
    x_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], codes.layout)
    w_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], w.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    blocks_m, blocks_n = (M + BLOCK_M - 1) // BLOCK_M, (N + BLOCK_N - 1) // BLOCK_N
    first, programs = gl.program_id(0), gl.num_programs(0)
    steps = (blocks_m * blocks_n - first + programs - 1) // programs * TILES
    for i in gl.static_range(STAGES - 1):
        _fetch(codes, w, filled, x_ring, w_ring, i, steps, first, programs, blocks_m, blocks_n, TILES, GROUP)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, min(BLOCK_N, 128), 32])
    WRITE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    step = steps * 0
    for _ in range(first, blocks_m * blocks_n, programs):
        total = gl.zeros([BLOCK_M, BLOCK_N], gl.int32, SUMS)
        block_m, block_n = _corner(step, first, programs, blocks_m, blocks_n, TILES, GROUP)
        for k in range(TILES):
            place, ahead = step % STAGES, step + STAGES - 1
            mbarrier.wait(filled.index(place), step // STAGES & 1)
            weight = w_ring.index(place).permute((1, 0))
            total = warpgroup_mma(x_ring.index(place), weight, total, use_acc=k > 0, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=[total])  # the tile before is read: its place is free
            _fetch(codes, w, filled, x_ring, w_ring, ahead, steps, first, programs, blocks_m, blocks_n, TILES, GROUP)
            step += 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=[total])
        _finish(total, scale, w_scale, bias, residual, out, block_m * BLOCK_M, block_n * BLOCK_N, M, N, WRITE)


@functools.cache
def layout_of(rows: int) -> gl.NVMMASharedLayout:
    """How TMA lays out `rows` rows of BLOCK_K codes in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, BLOCK_K], gl.int8)


@functools.cache
def num_programs(tile: Tile, device: torch.device) -> int:
    """As many as shared memory lets run side by side: two a multiprocessor for 128 x 128 and 3 stages."""
    taken = (tile.rows + tile.n) * BLOCK_K * tile.stages
    return runtime.num_multiprocessors(device) * max(1, runtime.MAX_SHARED // taken)


def launch(
    codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    tile: Tile,
) -> None:  # fmt: skip
    """The operands of `linear_8bit`, K a multiple of BLOCK_K. Both descriptors are parameters of the launch."""
    (rows, k), n = codes.shape, w.shape[0]
    x = TensorDescriptor(codes, [rows, k], [k, 1], [tile.rows, BLOCK_K], layout_of(tile.rows))
    weight = TensorDescriptor(w, [n, k], [k, 1], [tile.n, BLOCK_K], layout_of(tile.n))
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.n)
    pdl = runtime.uses_dependent_launch(codes.device)
    int8_kernel[(min(tiles, num_programs(tile, codes.device)),)](
        x, scale, weight, w_scale, bias, residual, out, rows, n, k, GROUP, tile.stages, pdl,
        num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
