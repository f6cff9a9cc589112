"""Compiles few-row products for sm_90, with no GPU, and prints what shared memory they take.

A process of its own, because kernels that were defined for the interpreter cannot be compiled. Input: lines of JSON
[kind, n, k, rows, group, has offset, is gated]. Output: lines [bytes, bound].
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.ops.triton import linear, runtime
from octavo.ops.triton.weights import UNITS

POINTERS = {"x": "bf16", "scale": "fp32", "norm": "bf16", "residual": "bf16", "out": "bf16"}
POINTERS |= {"offset": "fp32", "partial": "fp32", "counters": "i32"}
NUMBERS = {"N": "i32", "M": "i32", "eps": "fp32"}


def shared(kind: str, n: int, k: int, rows: int, group: int, has_offset: bool, is_gated: bool) -> tuple[int, int]:
    """Bytes of shared memory that the default tile takes, and the bound."""
    tile = runtime.default_tile(kind, n, k, runtime.bucket(rows))
    unit = 128 if kind == "int4" else next((unit for unit in UNITS if group % unit == 0), 0)
    block_k, split, lines, _ = linear._plan(tile, kind, k, unit, k // group)
    sizes = (tile, block_k, kind, group, has_offset, is_gated)
    stages = runtime.stages(*sizes)
    constants: dict[str, Any] = {"K": k, "GROUPS": k // group, "KIND": kind, "GATE": "silu" if is_gated else None}
    constants |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.n, "BLOCK_K": block_k, "SPLIT": split}
    constants |= {"LINES": lines, "PDL": True, "NATIVE": True}
    absent = {"bias", *(["scale"] if kind == "bf16" else []), *([] if has_offset else ["offset"])}
    pointers = POINTERS | {"w": {"bf16": "bf16", "int4": "i32", "int8": "i8"}[kind]}
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(linear.few_rows_kernel.arg_names):
        is_pointer = name in pointers and name not in absent
        signature[name] = f"*{pointers[name]}" if is_pointer else NUMBERS.get(name, "constexpr")
        if signature[name] == "constexpr":
            values[(i,)] = constants.get(name)
        elif is_pointer:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=linear.few_rows_kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": tile.warps, "num_stages": stages, "launch_pdl": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.metadata.shared, runtime.shared_bytes(*sizes, stages)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(shared(*json.loads(line))), flush=True)
