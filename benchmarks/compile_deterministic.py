"""Compiles what the deterministic mode launches for an H200, without one; fails where more than a few registers spill.

python benchmarks/compile_deterministic.py
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from compile_attention import attention_constants, build
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.ops.triton import attention_deterministic, log_softmax, norm_deterministic

MAX_SPILLED = 32  # bytes a thread; two sums of 64 rows and 128 channels take half of a thread's registers


def build_attention(group: int, head_dim: int, block_size: int, cache: torch.dtype, extras: bool = False) -> int:
    cut = attention_deterministic.cut_for(head_dim, group, torch.bfloat16)
    constants = attention_constants(group, head_dim, block_size, extras)
    constants |= {"HQ": 8 * group, "BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "PART": cut.part_keys}
    constants["HAS_WINDOW"] = extras
    label = f"attend group {group} head {head_dim} block {block_size} {str(cache)[6:]}{' extras' * extras}"
    kernel = attention_deterministic.attend_kernel
    spilled = build(label, kernel, constants, cut.num_warps, cut.num_stages, torch.bfloat16, cache)
    merge = {name: constants[name] for name in ("GROUP", "D", "BLOCK_D", "BLOCK_N", "PART", "HAS_SINKS", "PDL")}
    merge["ROWS"] = triton.next_power_of_2(group)
    return spilled + build(f"merge group {group} head {head_dim}", attention_deterministic.merge_kernel, merge, 4, 3)


def compile_rows(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> None:
    """Compile a kernel of one program a row; arguments without a type are int32."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(kernel.__name__, constants, flush=True)


def main() -> None:
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    shapes = ((4, 128), (2, 128), (3, 64), (4, 80), (2, 256))
    spilled = [build_attention(group, head_dim, 16, bf16) for group, head_dim in shapes]
    spilled += [build_attention(4, 128, 64, bf16), build_attention(4, 128, 16, fp8)]
    spilled.append(build_attention(4, 128, 16, bf16, extras=True))
    for width in (576, 1024, 4096):
        types = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"}
        constants = {"BLOCK": triton.next_power_of_2(width), "PDL": True}
        compile_rows(norm_deterministic.fixed_norm_kernel, types, constants, max(1, min(8, constants["BLOCK"] // 256)))
    compile_rows(log_softmax.log_softmax_kernel, {"logits": "*fp32", "out": "*fp32"}, {"TILE": log_softmax.TILE}, 16)
    if max(spilled) > MAX_SPILLED:
        raise SystemExit(f"{max(spilled)} bytes of registers spill")


if __name__ == "__main__":
    main()
