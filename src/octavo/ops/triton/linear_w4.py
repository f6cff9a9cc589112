"""4-bit codes in the order that the kernels read, how they become numbers, and whole weights made bf16.

A row of K codes is cut into units of 128 columns (the last one padded), and a unit is 16 words of 32 bits. Bits 4 j to
4 j + 3 of word i hold column 16 j + i. So part j of neighbouring words multiplies neighbouring values of x, loads are
16 bytes of words that need no taking apart, and a part never crosses a group of scales.

No conversion instruction is needed. Setting a code c below the exponent of 128 makes the bf16 number 128 + c exactly;
the idea is that of Kim et al., "Who Says Elephants Can't Run", 2022. In float32, `tiny_part` needs a mask alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton import runtime

UNIT = 128  # columns
WORDS = 16  # of a unit
_WORDS = tl.constexpr(WORDS)


def _pairs(zero: str) -> str:
    """Instructions that take two words to eight pairs of bf16 codes, less a number: part j of both in pair j.

    Bytes 0 or 1 (2 or 3) of both words become two halves of a register, whose four nibbles are two parts.
    """
    lines = [".reg .b32 both, one, zero;", "mov.b32 one, 0x3f803f80;", f"mov.b32 zero, {zero};"]
    for byte in range(4):
        low, high = 2 * byte, 2 * byte + 1
        lines += [
            f"prmt.b32 both, $8, $9, 0x{4 + byte}{4 + byte}{byte}{byte};",
            f"lop3.b32 ${low}, both, 0x000f000f, 0x43004300, 0xea;",
            "shr.u32 both, both, 4;",
            f"lop3.b32 ${high}, both, 0x000f000f, 0x43004300, 0xea;",
            f"fma.rn.bf16x2 ${low}, ${low}, one, zero;",
            f"fma.rn.bf16x2 ${high}, ${high}, one, zero;",
        ]
    return "{" + " ".join(lines) + "}"


_MINUS_128 = tl.constexpr(_pairs("0xc300c300"))
_MINUS_136 = tl.constexpr(_pairs("0xc308c308"))


def pack_codes(codes: Tensor) -> Tensor:
    """Codes [N, K / 2] with the even column in the low half of a byte, as words int32 [N, 16 ceil(K / 128)]."""
    codes = F.pad(codes, (0, -codes.shape[1] % (UNIT // 2)))
    columns = torch.stack((codes & 15, codes >> 4), dim=-1).view(codes.shape[0], -1, 8, WORDS)
    words = torch.zeros((codes.shape[0], columns.shape[1], WORDS), dtype=torch.int32, device=codes.device)
    for part in range(8):
        words |= columns[:, :, part].to(torch.int32) << 4 * part
    return words.flatten(1)


def unpack_codes(words: Tensor, columns: int) -> Tensor:
    """The codes [N, columns], uint8 and one a byte, of rows of words."""
    units = words.view(words.shape[0], -1, 1, WORDS)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)[:, None]
    return ((units >> shifts) & 15).to(torch.uint8).flatten(1)[:, :columns]


@triton.jit
def expand_codes(w, ZERO: tl.constexpr, NATIVE: tl.constexpr):
    """bf16 code - ZERO (0 or 8) of one unit of words [N, 16]: [N, 128] in the order of columns."""
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
        a, b, c, d = _code(w, 0, ZERO), _code(w, 1, ZERO), _code(w, 2, ZERO), _code(w, 3, ZERO)
        e, f, g, h = _code(w, 4, ZERO), _code(w, 5, ZERO), _code(w, 6, ZERO), _code(w, 7, ZERO)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    parts = tl.reshape(tl.join(even, odd), [w.shape[0], w.shape[1], 8])
    return tl.reshape(tl.permute(parts, (0, 2, 1)), [w.shape[0], 8 * w.shape[1]])


@triton.jit
def _code(w, part: tl.constexpr, ZERO: tl.constexpr):
    return (((w >> (4 * part)) & 15) - ZERO).to(tl.float32).to(tl.bfloat16)


@triton.jit
def tiny_part(w, part: tl.constexpr):
    """The codes of one part of words times 2^(place - 149), as float32, and times which number that is code 2^-49.

    Up to 24 bits read as a float32 are that integer times 2^-149, because the smallest exponent continues the
    subnormal numbers, and products take those as fast as others. So a mask makes a number of a code in its place.
    """
    PLACE: tl.constexpr = 4 * part if part < 6 else 4 * part - 8
    placed = w if part < 6 else w >> 8
    UP: tl.constexpr = 2.0 ** (100 - PLACE)
    return (placed & (15 << PLACE)).to(tl.float32, bitcast=True), UP


@triton.jit
def _of_unit(scale, row, column, first, K: tl.constexpr, GROUPS: tl.constexpr, UNIT: tl.constexpr):
    """Scales or offsets of a unit, [rows, 1] where it lies in one group, else [rows, columns]."""
    if (K // GROUPS) % UNIT == 0:
        value = tl.load(scale + row * GROUPS + first // (K // GROUPS))[:, None]
    else:
        group = tl.minimum(column, K - 1) // (K // GROUPS)
        value = tl.load(scale + row[:, None] * GROUPS + group[None, :])
    return value.to(tl.float32)


@triton.jit
def dequantize_kernel(
    w, scale, offset, out, N,
    K: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """out [N, K] bf16; a program makes BLOCK_N rows of one unit of columns."""
    unit = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)
    column = unit * UNIT + tl.arange(0, UNIT)
    factor = _of_unit(scale, row, column, unit * UNIT, K, GROUPS, UNIT)
    shift = _of_unit(offset, row, column, unit * UNIT, K, GROUPS, UNIT) if offset is not None else 0.0
    row, column = row[:, None], column[None, :]
    if KIND == "int4":
        ROW: tl.constexpr = (K + 127) // 128 * _WORDS
        word = unit * _WORDS + tl.arange(0, _WORDS)[None, :]
        codes = expand_codes(tl.load(w + row * ROW + word), 8 if offset is None else 0, NATIVE)
    else:
        codes = tl.load(w + row * K + column)
    value = codes.to(tl.float32) * factor + shift
    tl.store(out + row * K + column, value.to(tl.bfloat16), mask=(n < N)[:, None] & (column < K))


def dequantize(
    codes: Tensor, scale: Tensor, offset: Tensor | None, kind: str, shape: tuple[int, int], unit: int
) -> Tensor:
    """The whole weight [N, K] in bf16; the memory is the caching allocator's, so that layers use it in turn."""
    n, k = shape
    out = torch.empty(shape, dtype=torch.bfloat16, device=codes.device)
    block = 64
    dequantize_kernel[triton.cdiv(n, block), triton.cdiv(k, unit)](
        codes, scale, offset, out, n, k, scale.shape[1], kind, unit, block, runtime.is_native(), num_warps=4
    )
    return out
