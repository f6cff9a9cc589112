"""Compiles the attention and rotary kernels for an H200 on a machine without one, and fails where registers spill.

    python benchmarks/compile_attention.py

One line a kernel and configuration: registers a thread, bytes spilled, shared memory, and how many instructions for
matrix products (wgmma or mma) and asynchronous copies of 16 bytes there are. Seconds each; needs triton, no GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.ops.triton import (
    attention_cudnn,
    attention_decode,
    attention_fused,
    attention_leading,
    attention_prefill,
    attention_shared,
    latent,
    rotary,
)

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float8_e4m3fn: "*fp8e4nv"}
INDICES = {"block_table", "query_start", "seq_lens", "arrived", "tables", "num_shared", "counts"}
FLOATS = {"scale", "softcap", "eps"}
FLOAT_TENSORS = {"parts", "part_stats", "shared_parts", "shared_stats", "cos_sin", "past_lse", "chunk_lse"} | {
    "scales",
    "columns",
}
# Bytes a thread that may be spilled, and why; everything else must keep all in registers.
ALLOWED = {
    # 168 registers let three programs share a multiprocessor; in the SASS none of it lies in the loop over keys
    "decode group 3 head 64 block 16 bfloat16": 48,
    "decode group 4 head 128 block 16 bfloat16 after 1 shared parts": 24,
    "decode group 4 head 128 block 16 bfloat16 after 8 shared parts": 56,
}
UNALIGNED = {"stride_table", "tables"}


def signature(names: list[str], constants: dict[str, Any], pointers: set[str], q: str, cache: str) -> dict[str, str]:
    """The type of each argument, by its name."""
    types = {}
    for name in names:
        if name in constants:
            types[name] = "constexpr"
        elif name in FLOATS:
            types[name] = "fp32"
        elif name in FLOAT_TENSORS:
            types[name] = "*fp32"
        elif name in INDICES:
            types[name] = "*i32"
        elif name in ("positions", "slots"):
            types[name] = "*i64"
        elif name in ("k_cache", "v_cache", "pages", "cache"):
            types[name] = cache
        else:
            types[name] = q if name in pointers else "i32"
    return types


def build(
    label: str, kernel: Any, constants: dict[str, Any], warps: int, stages: int, *dtypes: torch.dtype,
    most: int | None = None,
) -> int:  # fmt: skip
    """Compile one kernel, print its line, and return the bytes it spills beyond those allowed."""
    q, cache = (TYPES[dtype] for dtype in (dtypes or (torch.bfloat16, torch.bfloat16)))
    names = kernel.arg_names
    pointers = {"q", "k", "v", "qkv", "q_norm", "k_norm", "q_out", "k_out", "v_out", "sinks", "out", "past", "chunk"}
    pointers |= {"latent", "norm"}
    types = signature(names, constants, pointers, q, cache)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in UNALIGNED and (types[name].startswith("*") or re.match(r"stride|\w+_(head|row)$", name))
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": most}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(PTXAS), "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (int(re.search(p, log)[1]) for p in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))  # type: ignore[index]
    products = f"{ptx.count('wgmma.mma_async'):4} wgmma {ptx.count('mma.sync'):4} mma"
    copies = len(re.findall(r"cp\.async\.cg.*0x10", ptx))
    shared = compiled.metadata.shared
    print(f"{label:<46}{registers:4} regs{spilled:5} spilled{shared:7} B {products}{copies:4} copies", flush=True)
    return max(0, spilled - ALLOWED.get(label, 0))


def attention_constants(group: int, head_dim: int, block_size: int, extras: bool) -> dict[str, Any]:
    constants = {"GROUP": group, "D": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim))}
    constants |= {
        "BLOCK_SIZE": block_size,
        "HAS_SOFTCAP": extras,
        "HAS_SINKS": extras,
        "PRECISION": "tf32",
        "PDL": True,
    }
    return constants


def build_decode(
    group: int, head_dim: int, block_size: int, cache: torch.dtype, extras: bool = False, splits: int = 0
) -> int:
    constants = attention_constants(group, head_dim, block_size, extras)
    rows = triton.next_power_of_2(group)
    tile, stages, _ = attention_decode.tile_for(head_dim, group, torch.bfloat16, cache)
    constants |= {"GROUP_ROWS": rows, "BLOCK_M": max(16, rows), "BLOCK_N": tile}
    constants |= {"MERGED": attention_decode.parts_at_once(rows, constants["BLOCK_D"]), "SHARED_SPLITS": splits}
    label = f"decode group {group} head {head_dim} block {block_size} {str(cache)[6:]}{' extras' * extras}"
    label += f" after {splits} shared parts" * (splits > 0)
    most = attention_decode.most_registers(head_dim, tile, cache)
    return build(label, attention_decode.decode_kernel, constants, 4, stages, torch.bfloat16, cache, most=most)


def build_leading(group: int, head_dim: int, block_size: int, cache: torch.dtype, extras: bool = False) -> int:
    constants = attention_constants(group, head_dim, block_size, extras)
    rows = triton.next_power_of_2(group)
    tile, stages, _ = attention_decode.tile_for(head_dim, group, torch.bfloat16, cache)
    constants |= {"GROUP_ROWS": rows, "BLOCK_M": max(16, rows), "BLOCK_N": tile, "HKV": 8}
    constants |= {"MERGED": attention_decode.parts_at_once(rows, constants["BLOCK_D"])}
    constants |= {"MOST_SPLITS": attention_decode.MOST_SPLITS}
    label = f"leading group {group} head {head_dim} block {block_size} {str(cache)[6:]}{' extras' * extras}"
    most = attention_decode.most_registers(head_dim, tile, cache)
    return build(label, attention_leading.leading_kernel, constants, 4, stages, torch.bfloat16, cache, most=most)


def build_shared(group: int, head_dim: int, block_size: int, cache: torch.dtype) -> int:
    constants = attention_constants(group, head_dim, block_size, False)
    del constants["HAS_SINKS"]
    keys = attention_decode.tile_for(head_dim, group, torch.bfloat16, cache).keys
    tile = min(attention_shared.MOST_KEYS, keys)
    constants |= {"BLOCK_M": attention_shared.ROWS, "BLOCK_N": tile}
    label = f"shared group {group} head {head_dim} block {block_size} {str(cache)[6:]}"
    return build(label, attention_shared.shared_kernel, constants, 4, 3, torch.bfloat16, cache)


def build_fused(group: int, head_dim: int, block_size: int, cache: torch.dtype, extras: bool = False) -> int:
    rows = triton.next_power_of_2(group)
    tile, stages, _ = attention_decode.tile_for(head_dim, group, torch.bfloat16, cache)
    constants = attention_constants(group, head_dim, block_size, extras)
    del constants["HAS_SINKS"]
    constants |= {"GROUP_ROWS": rows, "BLOCK_M": max(16, rows), "BLOCK_N": tile, "HQ": 8 * group, "HKV": 8}
    constants |= {"ROTARY": head_dim, "Q_NORM": extras, "K_NORM": extras, "INTERLEAVED": False}
    constants |= {} if extras else {"scales": None, "columns": None}
    constants |= {"LIMIT": rotary.FLOAT8_MAX if cache.itemsize == 1 else 0.0}
    constants["MERGED"] = attention_decode.parts_at_once(rows, constants["BLOCK_D"])
    label = f"fused group {group} head {head_dim} block {block_size} {str(cache)[6:]}{' extras' * extras}"
    most = attention_decode.most_registers(head_dim, tile, cache)
    return build(label, attention_fused.fused_kernel, constants, 4, stages, torch.bfloat16, cache, most=most)


def build_prefill(group: int, head_dim: int, block_size: int, cache: torch.dtype, extras: bool = False) -> int:
    spilled = 0
    for fills_gpu, skips in ((False, False), (True, False), (True, True)):
        tiles = attention_prefill.tiles_for(head_dim, torch.bfloat16, fills_gpu)
        constants = attention_constants(group, head_dim, block_size, extras)
        constants |= {"HQ": 8 * group, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "HAS_WINDOW": extras}
        constants |= {"SKIPS": skips}
        label = f"prefill group {group} head {head_dim} block {block_size} {str(cache)[6:]}{' extras' * extras}"
        kernel = attention_prefill.prefill_kernel
        spilled += build(label, kernel, constants, tiles.num_warps, tiles.num_stages, torch.bfloat16, cache)
    return spilled


def build_latent(heads: int, rank: int, turned: int, cache: torch.dtype) -> int:
    """Latent attention of a model with so many heads, whole and cut into parts, and what stores its rows."""
    block_h, block_n, warps = latent.tile_for(heads, torch.bfloat16, cache)
    sizes = {"H": heads, "RANK": rank, "BLOCK_R": triton.next_power_of_2(rank), "BLOCK_SIZE": 16}
    attend = {**sizes, "TURNED": turned, "BLOCK_P": triton.next_power_of_2(turned), "BLOCK_H": block_h}
    attend |= {"BLOCK_N": block_n, "PRECISION": "tf32"}
    label, types = f"heads {heads} rank {rank} {str(cache)[6:]}", (torch.bfloat16, cache)
    spilled = 0
    for splits in (1, 8):
        constants = {**attend, "SPLITS": splits}
        spilled += build(f"latent {label} splits {splits}", latent.attend_kernel, constants, warps, 2, *types)
    store = {**sizes, "HALF": turned // 2, "PAIRS": turned // 2, "HEADS": 8, "INTERLEAVED": True}
    store["LIMIT"] = rotary.FLOAT8_MAX if cache.itemsize == 1 else 0.0
    return spilled + build(f"latent store {label}", latent.store_kernel, store, 4, 3, *types)


def build_rest() -> int:
    size = {"BLOCK_SIZE": 16, "D": 128, "BLOCK_D": 128}
    store = {**size, "HEADS": 8, "HKV": 8, "LIMIT": 0.0, "PDL": True}
    turn = {**store, "ROTARY": 128, "HALF": 64, "REST": 1, "INTERLEAVED": False}
    spilled = 0
    for heads, norm in ((32, False), (16, True)):
        constants = {**turn, "HQ": heads, "Q_NORM": norm, "K_NORM": norm}
        constants |= {} if norm else {"scales": None, "columns": None}
        spilled += build(f"rotary {heads} heads, norm {norm}", rotary.rotary_kernel, constants, 2, 3)
    spilled += build("store", rotary.store_kernel, store, 2, 3)
    gather = {**size, "HKV": 8, "BLOCK_N": 64}
    for heads_first in (False, True):
        constants = {**gather, "HEADS_FIRST": heads_first}
        spilled += build(f"gather, heads first {heads_first}", attention_cudnn.gather_kernel, constants, 4, 3)
    return spilled + build("merge", attention_cudnn.merge_kernel, {"D": 128, "BLOCK_D": 128, "ROWS": 16}, 4, 3)


def main() -> None:
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    shapes = ((4, 128), (2, 128), (3, 64), (4, 80), (4, 96), (2, 256))
    spilled = build_rest()
    spilled += sum(build_fused(*shape, 16, bf16) for shape in ((4, 128), (2, 128), (3, 64), (4, 80)))
    spilled += sum(build_shared(*shape, 16, bf16) for shape in shapes) + build_shared(4, 128, 16, fp8)
    spilled += sum(build_decode(group, 128, 16, bf16, splits=splits) for group in (2, 4) for splits in (1, 8))
    spilled += build_fused(4, 128, 16, fp8) + build_fused(2, 128, 16, bf16, extras=True)
    for make in (build_decode, build_leading, build_prefill):
        spilled += sum(make(group, head_dim, 16, bf16) for group, head_dim in shapes)
        spilled += make(4, 128, 64, bf16) + make(4, 128, 16, fp8) + make(4, 128, 16, bf16, extras=True)
    spilled += sum(build_latent(heads, 512, 64, cache) for heads in (128, 16) for cache in (bf16, fp8))
    if spilled:
        raise SystemExit(f"{spilled} bytes of registers spill")


if __name__ == "__main__":
    main()
