"""4-bit codes in the order that the kernels read, how they become numbers, and whole weights made bf16.

A row of K codes is cut into units of UNIT columns (at most 128, never across a group); a unit is UNIT / 2 bytes. Byte b
of a unit holds the "low" column b in its low half and the "high" column UNIT / 2 + b above it, so that both halves
multiply x at contiguous places and no value changes its place when codes are taken apart.

Setting a code c below the exponent of 128 makes the bf16 number 128 + c exactly (and 1 + c / 256 or 1 + c / 16 in
float32), so no conversion instruction is needed; the idea is that of Kim et al., "Who Says Elephants Can't Run", 2022.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton import runtime

_BF16_PAIRS = """{
    .reg .b32 low, high, one, zero, bits;
    mov.b32 bits, 0x43434343;
    mov.b32 one, 0x3f803f80;
    mov.b32 zero, MINUS_ZERO;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, bits, 0x4140;
    prmt.b32 $1, low, bits, 0x4342;
    prmt.b32 $2, high, bits, 0x4140;
    prmt.b32 $3, high, bits, 0x4342;
    fma.rn.bf16x2 $0, $0, one, zero;
    fma.rn.bf16x2 $1, $1, one, zero;
    fma.rn.bf16x2 $2, $2, one, zero;
    fma.rn.bf16x2 $3, $3, one, zero;
}"""
_MINUS_128 = tl.constexpr(_BF16_PAIRS.replace("MINUS_ZERO", "0xc300c300"))
_MINUS_136 = tl.constexpr(_BF16_PAIRS.replace("MINUS_ZERO", "0xc308c308"))
_FLOATS = tl.constexpr(
    "{ .reg .b32 t;"
    + "".join(
        f"{shift}.b32 t, $8, {count};"
        f"lop3.b32 ${i}, t, 0x00078000, 0x3f800000, 0xea;"
        f"lop3.b32 ${i + 4}, t, 0x00780000, 0x3f800000, 0xea;"
        for i, (shift, count) in enumerate((("shl", 15), ("shl", 7), ("shr", 1), ("shr", 9)))
    )
    + "}"
)


def pack_codes(codes: Tensor, unit: int) -> Tensor:
    """Codes [N, K / 2] with the even column in the low half of a byte, to the order of the kernels, same shape."""
    columns = torch.stack((codes & 15, codes >> 4), dim=-1).view(codes.shape[0], -1, 2, unit // 2)
    return (columns[:, :, 0] | (columns[:, :, 1] << 4)).reshape(codes.shape)


def unpack_codes(packed: Tensor, unit: int) -> Tensor:
    """The codes [N, K], one a byte, of rows in the order of the kernels."""
    units = packed.view(packed.shape[0], -1, unit // 2)
    return torch.stack((units & 15, units >> 4), dim=2).flatten(1)


@triton.jit
def expand_codes(w, ZERO: tl.constexpr, NATIVE: tl.constexpr):
    """bf16 code - ZERO (0 or 8) of the low and the high columns of a tile of bytes."""
    if NATIVE:
        ASM: tl.constexpr = _MINUS_136 if ZERO == 8 else _MINUS_128
        low, high = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low = ((w & 15).to(tl.float32) - ZERO).to(tl.bfloat16)
        high = ((w >> 4).to(tl.float32) - ZERO).to(tl.bfloat16)
    return low, high


@triton.jit
def expand_floats(w, NATIVE: tl.constexpr):
    """float32 1 + code / 256 of the low columns of a tile of bytes, and 1 + code / 16 of the high ones."""
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            _FLOATS,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            [w],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        low = 1 + (w & 15).to(tl.float32) / 256
        high = 1 + (w >> 4).to(tl.float32) / 16
    return low, high


@triton.jit
def dequantize_kernel(
    w, scale, offset, out, N,
    K: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """out [N, K] bf16; a program makes BLOCK_N rows of one unit."""
    BYTES: tl.constexpr = UNIT // 2 if KIND == "int4" else UNIT
    ROW: tl.constexpr = K // 2 if KIND == "int4" else K
    unit = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (n < N)[:, None]
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    byte = tl.arange(0, BYTES)
    codes = tl.load(w + row * ROW + unit * BYTES + byte[None, :])
    group = unit * UNIT // (K // GROUPS)
    factor = tl.load(scale + row * GROUPS + group).to(tl.float32)
    shift = tl.load(offset + row * GROUPS + group).to(tl.float32) if offset is not None else 0.0
    target = out + row * K + unit * UNIT + byte[None, :]
    if KIND == "int4":
        ZERO: tl.constexpr = 8 if offset is None else 0
        low, high = expand_codes(codes, ZERO, NATIVE)
        tl.store(target, (low.to(tl.float32) * factor + shift).to(tl.bfloat16), mask=inside)
        tl.store(target + BYTES, (high.to(tl.float32) * factor + shift).to(tl.bfloat16), mask=inside)
    else:
        tl.store(target, (codes.to(tl.float32) * factor + shift).to(tl.bfloat16), mask=inside)


def dequantize(
    codes: Tensor, scale: Tensor, offset: Tensor | None, kind: str, shape: tuple[int, int], unit: int
) -> Tensor:
    """The whole weight [N, K] in bf16; the memory is the caching allocator's, so that layers use it in turn."""
    n, k = shape
    out = torch.empty(shape, dtype=torch.bfloat16, device=codes.device)
    block = 64
    dequantize_kernel[triton.cdiv(n, block), k // unit](
        codes, scale, offset, out, n, k, scale.shape[1], kind, unit, block, runtime.is_native(), num_warps=4
    )
    return out
