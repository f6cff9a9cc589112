"""The product of one row of 8-bit codes, without matrix units: all of a program's weights are on their way at once.

With one row, a program does nothing but read its rows of W; what counts is how many bytes are under way. A program
asks for a tile of W, 16 bytes a thread at a time, before the kernel ahead has ended, and for the next tile while it
multiplies. Codes are read as words: four int8 for DP4A (four products an instruction, sums in int32), eight E4M3 that
become pairs of half floats, where each product is exact. Sums cross threads once, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import runtime
from octavo.ops.triton.runtime import Tile


@triton.jit
def _code(word, i: tl.constexpr, IS_INT: tl.constexpr):
    """Code i of each word, as a number of the sums."""
    byte = (word >> (8 * i)).to(tl.int8)
    return byte.to(tl.int32) if IS_INT else byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _halves(word):
    """The eight E4M3 numbers of each 64-bit word times 2^-6, exactly, as four pairs of half floats."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, factor;
        .reg .b16 p<4>;
        mov.b64 {low, high}, $4;
        mov.b32 {p0, p1}, low;
        mov.b32 {p2, p3}, high;
        mov.b32 factor, 0x24002400;
        cvt.rn.f16x2.e4m3x2 $0, p0;
        cvt.rn.f16x2.e4m3x2 $1, p1;
        cvt.rn.f16x2.e4m3x2 $2, p2;
        cvt.rn.f16x2.e4m3x2 $3, p3;
        mul.rn.f16x2 $0, $0, factor;
        mul.rn.f16x2 $1, $1, factor;
        mul.rn.f16x2 $2, $2, factor;
        mul.rn.f16x2 $3, $3, factor;
        }""",
        "=&r,=&r,=&r,=&r,l",
        [word],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _add_int8(total, w, x, NATIVE: tl.constexpr):
    """total plus the four products of int8 codes of each pair of words."""
    if NATIVE:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [w, x, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        total += _code(w, 0, True) * _code(x, 0, True) + _code(w, 1, True) * _code(x, 1, True)
        total += _code(w, 2, True) * _code(x, 2, True) + _code(w, 3, True) * _code(x, 3, True)
    return total


@triton.jit
def _add_halves(total, w, x0, x1, x2, x3):
    """total plus 2^-6 times the eight products of E4M3 codes of w and of x, given by `_halves`.

    Two numbers of four bits have a product of eight: a half float holds it exactly under that factor, at most 3,136 and
    a multiple of 2^-24. Four products are added in half precision, three roundings, before the sum in float32 gets
    them: 2.5e-4 of the result, where bfloat16 rounds off seven times as much and the sums of matrix units more, too.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, sum, w<4>;
        .reg .b16 p<4>, even, odd;
        .reg .f32 a, b;
        mov.b64 {low, high}, $1;
        mov.b32 {p0, p1}, low;
        mov.b32 {p2, p3}, high;
        cvt.rn.f16x2.e4m3x2 w0, p0;
        cvt.rn.f16x2.e4m3x2 w1, p1;
        cvt.rn.f16x2.e4m3x2 w2, p2;
        cvt.rn.f16x2.e4m3x2 w3, p3;
        mul.rn.f16x2 sum, w0, $2;
        fma.rn.f16x2 sum, w1, $3, sum;
        fma.rn.f16x2 sum, w2, $4, sum;
        fma.rn.f16x2 sum, w3, $5, sum;
        mov.b32 {even, odd}, sum;
        cvt.f32.f16 a, even;
        cvt.f32.f16 b, odd;
        add.rn.f32 a, a, b;
        add.rn.f32 $0, $6, a;
        }""",
        "=f,l,r,r,r,r,f",
        [w, x0, x1, x2, x3, total],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _add_fp8(total, w, x, NATIVE: tl.constexpr):
    """total plus 2^-6 times the eight products of E4M3 codes of each pair of 64-bit words."""
    if NATIVE:
        x0, x1, x2, x3 = _halves(x)
        total = _add_halves(total, w, x0, x1, x2, x3)
    else:
        for i in tl.static_range(8):
            total += _code(w, i, False) * (_code(x, i, False) * 0.015625)
    return total


@triton.jit
def _words(place, word, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """Words of rows that begin at `place`; EVEN says that none is past the end of a row."""
    if EVEN:
        return tl.load(place + word[None, :])
    return tl.load(place + word[None, :], mask=(word < WORDS)[None, :], other=0)


@triton.jit
def gemv_8bit_kernel(
    codes, scale, w, w_scale, bias, residual, out, N,
    K: tl.constexpr, IS_INT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """codes [K] and w [N, K] to out [N], both as words, int32 of int8 and int64 of E4M3.

    A program takes BLOCK_N rows, BLOCK_K bytes at a time.
    """
    SIZE: tl.constexpr = 4 if IS_INT else 8
    WORDS: tl.constexpr = K // SIZE
    BLOCK: tl.constexpr = BLOCK_K // SIZE
    TILES: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    EVEN: tl.constexpr = WORDS % BLOCK == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    place = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * WORDS
    word = tl.arange(0, BLOCK)
    weight = _words(place, word, WORDS, EVEN)
    w_factor = tl.load(w_scale + n, mask=inside, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK_N, BLOCK], tl.int32 if IS_INT else tl.float32)
    for tile in tl.static_range(TILES):
        x = _words(codes, word, WORDS, EVEN)
        word += BLOCK
        following = weight
        if tile + 1 < TILES:
            following = _words(place, word, WORDS, EVEN)
        total = _add_int8(total, weight, x, NATIVE) if IS_INT else _add_fp8(total, weight, x, NATIVE)
        weight = following
    whole = tl.sum(total, axis=1).to(tl.float32)
    if not IS_INT:
        whole *= 64.0  # undoes the factor of `_halves`
    y = whole * w_factor * tl.load(scale)
    if bias is not None:
        y += tl.load(bias + n, mask=inside, other=0).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    if residual is not None:
        y = (y.to(tl.float32) + tl.load(residual + n, mask=inside, other=0).to(tl.float32)).to(y.dtype)
    tl.store(out + n, y, mask=inside)


def launch_one(
    codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    tile: Tile,
) -> None:  # fmt: skip
    """The operands of `linear_8bit` for one row. tile.n rows of w a program, tile.k bytes of each at a time."""
    k, n = codes.shape[1], w.shape[0]
    pdl = runtime.uses_dependent_launch(codes.device)
    is_int = codes.dtype == torch.int8
    word = torch.int32 if is_int else torch.int64
    gemv_8bit_kernel[(triton.cdiv(n, tile.n),)](
        codes.view(word), scale, w.view(word), w_scale, bias, residual, out, n, k, is_int, tile.n,
        min(tile.k, triton.next_power_of_2(k)), pdl, runtime.is_native(), num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip


def candidates(k: int) -> list[Tile]:
    """Sizes worth timing: all of a short row at once, or a part and the next."""
    at_once = [(4, 4096, 4), (8, 4096, 8), (4, 4096, 8), (2, 4096, 4)] if k <= 4096 else [(4, 4096, 8)]
    sizes = [*at_once, (4, 2048, 4), (8, 2048, 8), (8, 2048, 4), (2, 2048, 4)]
    return [Tile(1, n, block, 1, warps, 1) for n, block, warps in sizes]
