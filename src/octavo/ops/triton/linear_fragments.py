"""Products with 4-bit codes stored as the registers of a matrix instruction want them, for one row to a few hundred.

The matrix units take W in registers: of 16 rows and 16 columns, thread (row r, quarter q) holds rows r and r + 8 and
the columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9. `pack` puts the codes of eight such pieces, a unit of 128 columns, side by
side, so that a thread's 16 bytes are all that it needs of a row: no code changes threads. Two codes lie 16 bits apart,
and become two bf16 numbers by a shift, a mask and a sum: see `linear_w4.py`. Sums of a group are scaled in float32;
where many rows leave no registers for them, the weight itself is scaled and rounded to bf16.

Programs have equal shares of the units; see `equal_shares.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import elementwise, runtime
from octavo.ops.triton.equal_shares import gather, leave, owner
from octavo.ops.triton.gemv import prefetch, weight_tile
from octavo.ops.triton.linear import input_tile, multiply, norm_tile, write

if TYPE_CHECKING:
    from octavo.ops.triton.linear import Weight
    from octavo.ops.triton.runtime import Tile

UNIT = 128  # columns
WORDS = 16  # of a unit
_SCALED_ROWS = tl.constexpr(128)  # from so many rows of a block on, the weight is scaled and not the sums


def _expansion(zero: str) -> str:
    """Two words to eight pairs of bf16 codes, less a number: four pairs of each word."""
    lines = [".reg .b32 part, one, zero;", "mov.b32 one, 0x3f803f80;", f"mov.b32 zero, {zero};"]
    for pair in range(8):
        word = f"${8 + pair // 4}"
        if pair % 4:
            lines.append(f"shr.u32 part, {word}, {4 * (pair % 4)};")
        source = "part" if pair % 4 else word
        lines.append(f"lop3.b32 ${pair}, {source}, 0x000f000f, 0x43004300, 0xea;")
        lines.append(f"fma.rn.bf16x2 ${pair}, ${pair}, one, zero;")
    return "{" + " ".join(lines) + "}"


_MINUS_128 = tl.constexpr(_expansion("0xc300c300"))
_MINUS_136 = tl.constexpr(_expansion("0xc308c308"))


def pack(codes: Tensor) -> Tensor:
    """Codes [N, K / 2] with the even column in the low half of a byte, as words int32 [N, 16 ceil(K / 128)].

    Bits 4 t to 4 t + 3, t = 4 e + u, of word 4 q + 2 i + o of a unit hold its column 64 o + 16 u + 8 i + 2 q + e.
    """
    codes = F.pad(codes, (0, -codes.shape[1] % (UNIT // 2)))
    columns = torch.stack((codes & 15, codes >> 4), dim=-1).view(codes.shape[0], -1, 2, 4, 2, 4, 2)
    parts = columns.permute(0, 1, 5, 4, 2, 6, 3).reshape(*columns.shape[:2], WORDS, 8)  # [..., q i o, e u]
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=codes.device)
    for place in range(8):
        words |= parts[..., place].to(torch.int32) << 4 * place
    return words.flatten(1)


def unpack(words: Tensor, columns: int) -> Tensor:
    """The codes [N, columns], uint8 and one a byte, of rows of words."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    parts = ((words[..., None] >> shifts) & 15).to(torch.uint8).view(words.shape[0], -1, 4, 2, 2, 2, 4)
    return parts.permute(0, 1, 4, 6, 3, 2, 5).flatten(1)[:, :columns]


@triton.jit
def _halves(w, o: tl.constexpr, u: tl.constexpr, ZERO: tl.constexpr):
    """For words [N, 8, 2] the pair of word o at both places: [N, 16]."""
    even, odd = tl.split(w)
    word = odd if o == 1 else even
    pair = tl.join((word >> (4 * u)) & 15, (word >> (4 * u + 16)) & 15)
    return tl.reshape((pair - ZERO).to(tl.float32).to(tl.bfloat16), [w.shape[0], 16])


@triton.jit
def expand(w, ZERO: tl.constexpr, WARPS: tl.constexpr, NATIVE: tl.constexpr):
    """bf16 code - ZERO (0 or 8) of one unit of words [N, 16]: [N, 128], rows in the order of `row_order`."""
    N: tl.constexpr = w.shape[0]
    if NATIVE:
        ASM: tl.constexpr = _MINUS_136 if ZERO == 8 else _MINUS_128
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [w],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16
            ),
            is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        v = tl.reshape(w, [N, 8, 2])
        a, b, c, d = _halves(v, 0, 0, ZERO), _halves(v, 0, 1, ZERO), _halves(v, 0, 2, ZERO), _halves(v, 0, 3, ZERO)
        e, f, g, h = _halves(v, 1, 0, ZERO), _halves(v, 1, 1, ZERO), _halves(v, 1, 2, ZERO), _halves(v, 1, 3, ZERO)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    parts = tl.reshape(tl.join(even, odd), [N // (16 * WARPS), 2, WARPS, 8, 4, 2, 2, 8])
    return tl.reshape(tl.permute(parts, (0, 2, 1, 3, 7, 5, 4, 6)), [N, 128])


@triton.jit
def row_order(BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Which row of a block is loaded at which place, so that `expand` gives them in order."""
    place = tl.arange(0, BLOCK_N)
    half = place // (8 * WARPS) % 2
    return place // (16 * WARPS) * (16 * WARPS) + place // 8 % WARPS * 16 + half * 8 + place % 8


@triton.jit
def _add(
    total, w, x, scale, offset, row, group, GROUPS: tl.constexpr, WARPS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """total [BLOCK_N, BLOCK_M] and what a unit adds: w words, row the rows in order."""
    codes = expand(w, 8 if offset is None else 0, WARPS, NATIVE)
    factor = tl.load(scale + row * GROUPS + group)
    if x.shape[0] >= _SCALED_ROWS:
        shift = 0.0
        if offset is not None:
            shift = tl.load(offset + row * GROUPS + group)[:, None]
        if NATIVE and offset is None:
            value = codes * factor.to(tl.bfloat16)[:, None]  # in pairs
        else:
            value = (codes.to(tl.float32) * factor[:, None] + shift).to(tl.bfloat16)
        total = multiply(value, x, total, NATIVE)
    else:
        total += multiply(codes, x, tl.zeros_like(total), NATIVE) * factor[:, None]
        if offset is not None:
            total += tl.load(offset + row * GROUPS + group)[:, None] * tl.sum(x.to(tl.float32), axis=1)[None, :]
    return total


@triton.jit(do_not_specialize=["M"])
def fragments_kernel(
    x, w, scale, offset, norm, bias, residual, out, partial, counters, M, N, eps,
    K: tl.constexpr, GROUPS: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr, PROGRAMS: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """x [M, K] to out [M, N]; grid (PROGRAMS, blocks of M). LINES: lines of a row to ask for before the wait."""
    TILES: tl.constexpr = K // 128
    ROW: tl.constexpr = K // 8
    SIZE: tl.constexpr = (2 * BLOCK_N + 1) * BLOCK_M
    blocks = tl.cdiv(N, BLOCK_N)
    total = blocks * TILES
    program = tl.program_id(0)
    begin, end = program * total // PROGRAMS, (program + 1) * total // PROGRAMS
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    areas = partial + tl.program_id(1).to(tl.int64) * (2 * PROGRAMS * SIZE)
    arrived = counters + tl.program_id(1) * blocks
    place = row_order(BLOCK_N, WARPS)
    norm_factor = norm_tile(norm, begin % TILES * 128 + tl.arange(0, 128), K)
    if PDL:
        if LINES > 0:
            stored = tl.minimum(begin // TILES * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
            prefetch(w, stored, begin % TILES * 64, ROW * 4, LINES * 128, LINES)
            if GATE is not None:
                prefetch(w, stored + N, begin % TILES * 64, ROW * 4, LINES * 128, LINES)
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M, 128], tl.float32)
    for tile in range(begin, end):
        block = tile // TILES
        unit = tile % TILES
        group = unit * 128 // (K // GROUPS)
        column = unit * 128 + tl.arange(0, 128)
        word = unit * 16 + tl.arange(0, 16)
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.minimum(n, N - 1)
        stored = tl.minimum(block * BLOCK_N + place, N - 1)
        next_norm = norm_tile(norm, (tile + 1) % TILES * 128 + tl.arange(0, 128), K)
        value, square = input_tile(x, norm, norm_factor, m, column, M, K, True)
        if norm is not None:
            squares += square
        codes = weight_tile(w, stored, word, ROW, True)
        gate = _add(gate, codes, value, scale, offset, row, group, GROUPS, WARPS, NATIVE)
        if GATE is not None:
            codes = weight_tile(w, stored + N, word, ROW, True)
            up = _add(up, codes, value, scale, offset, row + N, group, GROUPS, WARPS, NATIVE)
        norm_factor = next_norm
        is_end = unit == TILES - 1
        if is_end or tile == end - 1:
            square_sum = tl.sum(squares, axis=1)
            if is_end and tile - TILES + 1 >= begin:
                write(
                    gate, up, square_sum, None, None, norm, bias, residual, out, m, n, M, N, eps, K, 1, "int4", GATE
                )  # fmt: skip
            else:
                slot = tl.where(block == begin // TILES, 0, 1)
                leave(gate, up, square_sum, norm, areas + (2 * program + slot) * SIZE, BLOCK_M, BLOCK_N, GATE)
            gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            squares = tl.zeros([BLOCK_M, 128], tl.float32)
    tl.debug_barrier()  # the stores of all threads come before the one thread's release
    for slot in range(2):
        block = begin // TILES if slot == 0 else (end - 1) // TILES
        first_tile = block * TILES
        is_whole = begin <= first_tile and first_tile + TILES <= end
        if begin < end and not is_whole and (slot == 0 or block != begin // TILES):
            first_program = owner(first_tile, total, PROGRAMS)
            last_program = owner(first_tile + TILES - 1, total, PROGRAMS)
            if tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu") == last_program - first_program:
                tl.store(arrived + block, 0)  # for the next product
                first_slot = tl.where(first_program * total // PROGRAMS < first_tile, 1, 0)
                gate, up, square_sum = gather(
                    norm, areas, first_program, last_program, first_slot, BLOCK_M, BLOCK_N, GATE
                )
                n = block * BLOCK_N + tl.arange(0, BLOCK_N)
                write(
                    gate, up, square_sum, None, None, norm, bias, residual, out, m, n, M, N, eps, K, 1, "int4", GATE
                )  # fmt: skip


def fragments(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`linear.few_rows` for words of `pack`. The split of a tile: how many programs share a block of rows of x."""
    rows, k = x.shape
    n = weight.shape[0] if gate is None else weight.shape[0] // 2
    tile = tile or default_tile(rows, n)
    if tile.n % (16 * tile.warps):
        raise ValueError(f"tile {tuple(tile)}: {tile.n} rows of the weight are no multiple of 16 for each warp")
    if norm is not None and rows > 1:
        x, norm = elementwise.rms_norm(x, norm, eps), None
    blocks, row_blocks = triton.cdiv(n, tile.n), triton.cdiv(rows, tile.rows)
    programs = min(tile.split, blocks * (k // UNIT))  # none has an empty share
    out = torch.empty((rows, n), dtype=out_dtype, device=x.device)
    size = row_blocks * programs * 2 * (2 * tile.n + 1) * tile.rows
    partial = torch.empty(size, dtype=torch.float32, device=x.device)
    pdl = runtime.uses_dependent_launch(x.device)
    lines = 4 if pdl and rows <= 64 else 0
    fragments_kernel[(programs, row_blocks)](
        x, weight.data, weight.scale, weight.offset, norm, bias, residual, out, partial,
        runtime.counters(x.device, blocks * row_blocks), rows, n, eps, k, weight.groups, gate,
        tile.rows, tile.n, tile.warps, programs, lines, pdl, runtime.is_native(),
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def default_tile(rows: int, n: int) -> Tile:
    """Sizes for a shape that nobody measured, for an H200's 132 multiprocessors."""
    block = next((size for size in (8, 16, 32, 64) if rows <= size), 128)
    if block == 128:
        return runtime.Tile(128, 128, UNIT, max(1, 132 // triton.cdiv(rows, 128)), 8, 3)
    return runtime.Tile(block, 64 if n < 8192 else 128, UNIT, 264 if block < 64 else 132, 4, 5 if block < 64 else 3)
