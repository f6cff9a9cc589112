"""The product of one row of 8-bit codes, without matrix units: all of a program's weights are on their way at once.

With one row, a program does nothing but read its rows of W; what counts is how many bytes are under way. A program
asks for a tile of W, 16 bytes a thread at a time, before the kernel ahead has ended, and for the next tile while it
multiplies. Codes are read as words of four: int8 by DP4A (four products an instruction, sums in int32), E4M3 expanded
to float32, where each product is exact. Sums cross threads once, at the end.
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
def _expand(word, NATIVE: tl.constexpr):
    """The four E4M3 numbers of each word, in float32."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, h<4>;
            .reg .b32 pair<2>;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 pair0, low;
            cvt.rn.f16x2.e4m3x2 pair1, high;
            mov.b32 {h0, h1}, pair0;
            mov.b32 {h2, h3}, pair1;
            cvt.f32.f16 $0, h0;
            cvt.f32.f16 $1, h1;
            cvt.f32.f16 $2, h2;
            cvt.f32.f16 $3, h3;
            }""",
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return _code(word, 0, False), _code(word, 1, False), _code(word, 2, False), _code(word, 3, False)


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
def _add_fp8(total, w, x, NATIVE: tl.constexpr):
    """The same for E4M3 codes."""
    w0, w1, w2, w3 = _expand(w, NATIVE)
    x0, x1, x2, x3 = _expand(x, NATIVE)
    total = total + w0 * x0
    total = total + w1 * x1
    total = total + w2 * x2
    return total + w3 * x3


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
    """codes [K] and w [N, K], as int32 words, to out [N]; a program takes BLOCK_N rows, BLOCK_K bytes at a time."""
    WORDS: tl.constexpr = K // 4
    BLOCK: tl.constexpr = BLOCK_K // 4
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
    y = tl.sum(total, axis=1).to(tl.float32) * w_factor * tl.load(scale)
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
    gemv_8bit_kernel[(triton.cdiv(n, tile.n),)](
        codes.view(torch.int32), scale, w.view(torch.int32), w_scale, bias, residual, out, n, k,
        codes.dtype == torch.int8, tile.n, min(tile.k, triton.next_power_of_2(k)), pdl, runtime.is_native(),
        num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip


def candidates(k: int) -> list[Tile]:
    """Sizes worth timing: all of a short row at once, or a part and the next."""
    at_once = [(4, 4096, 4), (8, 4096, 8), (4, 4096, 8), (2, 4096, 4)] if k <= 4096 else [(4, 4096, 8)]
    sizes = [*at_once, (4, 2048, 4), (8, 2048, 8), (8, 2048, 4), (2, 2048, 4)]
    return [Tile(1, n, block, 1, warps, 1) for n, block, warps in sizes]
