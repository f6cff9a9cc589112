"""Compiles every 8-bit and elementwise kernel for a GPU of compute capability 9.0; none needs to be there.

    python benchmarks/compile_8bit.py [FILTER]

Prints registers, spills, shared memory and which matrix instructions were chosen. Fails where a kernel spills, does not
fit, or misses the instruction that it was written for.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from octavo.ops.triton import elementwise, gemv_8bit, linear_8bit, linear_int8_async, quantize, runtime
from octavo.ops.triton.runtime import Tile

TARGET = GPUTarget("cuda", 90, 32)
MAX_SHARED = 227 * 1024
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4096, 1024), (576, 576))


def compile_kernel(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, Any]
) -> tuple[str, int]:
    """PTX and bytes of shared memory; pointers and widths are taken to be multiples of 16, as they are."""
    names = kernel.arg_names
    given = {name: signature.get(name, "constexpr") for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    skipped = {"M", "eps"}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if name not in skipped and (kind.startswith("*") or kind == "i32")
    }
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(fn=kernel, signature=given, constexprs=fixed, attrs=aligned)
    compiled = triton.compile(source, target=TARGET, options=options)
    return compiled.asm["ptx"], compiled.metadata.shared


def registers(ptx: str) -> tuple[int, int]:
    """Registers a thread and bytes spilled, from ptxas."""
    ptxas = triton.knobs.nvidia.ptxas.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [ptxas, "-v", "--gpu-name", "sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", output)
    spilled = re.findall(r"(\d+) bytes spill", output)
    assert used is not None
    return int(used.group(1)), sum(map(int, spilled))


def report(name: str, compiled: tuple[str, int], wanted: str = "") -> bool:
    """Prints a line; whether the kernel is as it should be."""
    ptx, shared = compiled
    used, spilled = registers(ptx)
    matrix = sorted(
        set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m\d+n\d+k\d+\.[a-z0-9.]+|mma\.sync\.aligned\.m\S+", ptx))
    )
    good = spilled == 0 and shared <= MAX_SHARED and (not wanted or any(m.startswith(wanted) for m in matrix))
    verdict = " ".join(matrix) + ("" if good else "  BAD")
    print(f"{name:52} {used:3} regs {spilled:4} spilled {shared / 1024:5.0f} KiB {verdict}")
    return good


def few_rows(tile: Tile, k: int, kind: str, with_extras: bool) -> tuple[str, int]:
    code, total = ("i8", "i32") if kind == "w8a8" else ("fp8e4nv", "fp32")
    block_k, split = linear_8bit._parts(k, tile.k, abs(tile.split))
    signature = {"codes": f"*{code}", "scale": "*fp32", "w": f"*{code}", "w_scale": "*fp32", "out": "*bf16"}
    constants: dict[str, Any] = {"x_tiles": None, "w_tiles": None}
    if tile.split < 0:
        signature["x_tiles"] = f"tensordesc<{code}[{tile.rows}, {block_k}]>"
        signature["w_tiles"] = f"tensordesc<{code}[{tile.n}, {block_k}]>"
        constants = {}
    for name, pointer in (("bias", "*bf16"), ("residual", "*bf16"), ("partial", f"*{total}"), ("counters", "*i32")):
        if split > 1 if name in ("partial", "counters") else with_extras:
            signature[name] = pointer
        else:
            constants[name] = None
    signature |= {"M": "i32", "N": "i32"}
    sums = triton.language.int32 if kind == "w8a8" else triton.language.float32
    constants |= {"K": k, "SUM": sums, "BLOCK_M": tile.rows, "BLOCK_N": tile.n, "BLOCK_K": block_k}
    constants |= {"SPLIT": split, "PDL": True}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True}
    return compile_kernel(linear_8bit.few_rows_kernel, signature, constants, options)


def build_one(tile: Tile, k: int, kind: str, with_extras: bool) -> tuple[str, int]:
    signature = {"codes": "*i32", "scale": "*fp32", "w": "*i32", "w_scale": "*fp32", "out": "*bf16"}
    constants: dict[str, Any] = {}
    for name in ("bias", "residual"):
        if with_extras:
            signature[name] = "*bf16"
        else:
            constants[name] = None
    signature["N"] = "i32"
    block_k = min(tile.k, triton.next_power_of_2(k))
    constants |= {"K": k, "IS_INT": kind == "w8a8", "BLOCK_N": tile.n, "BLOCK_K": block_k, "PDL": True, "NATIVE": True}
    options = {"num_warps": tile.warps, "launch_pdl": True}
    return compile_kernel(gemv_8bit.gemv_8bit_kernel, signature, constants, options)


def many_rows(tile: Tile, k: int, kind: str, with_extras: bool) -> tuple[str, int]:
    code = "i8" if kind == "w8a8" else "fp8e4nv"
    signature = {"codes": f"tensordesc<{code}[{tile.rows}, {tile.k}]>", "scale": "*fp32"}
    signature |= {"w": f"tensordesc<{code}[{tile.n}, {tile.k}]>", "w_scale": "*fp32", "out": "*bf16"}
    constants: dict[str, Any] = {}
    for name in ("bias", "residual"):
        if with_extras:
            signature[name] = "*bf16"
        else:
            constants[name] = None
    signature |= {"M": "i32", "N": "i32"}
    sums = triton.language.int32 if kind == "w8a8" else triton.language.float32
    constants |= {"K": k, "SUM": sums, "BLOCK_M": tile.rows, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    constants |= {"GROUP": linear_8bit.GROUP, "PARTS": 2 if tile.n >= 256 else 1, "PDL": True}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True}
    return compile_kernel(linear_8bit.many_rows_kernel, signature, constants, options)


def products(wanted: str) -> list[bool]:
    results = []
    seen = set()
    for kind in ("w8a8", "fp8"):
        for n, k in SHAPES:
            for m in linear_8bit.BUCKETS:
                default = linear_8bit.default_tile(n, k, m)
                others = gemv_8bit.candidates(k) if m == 1 else []
                if default.split > 0 and m > 1:  # by tensor descriptors
                    others = [Tile(default.rows, block, 128, -1, 4, stages) for block, stages in ((64, 6), (128, 4))]
                for tile in (default, *others):
                    key = (kind, k if tile.split else 0, tile)
                    if key in seen or wanted not in f"{kind} {n}x{k} m{m}":
                        continue
                    seen.add(key)
                    build = build_one if m == 1 else few_rows if tile.split else many_rows
                    name = f"{kind} {n}x{k} m{m} {tuple(tile)}"
                    results.append(report(name, build(tile, k, kind, m % 32 == 0), "wgmma" if m > 1 else ""))
    return results


def in_flight(tile: Tile, k: int, out: str, with_bias: bool, with_residual: bool) -> tuple[str, int]:
    block_k, layout = linear_int8_async.BLOCK_K, linear_int8_async.layout_of
    signature = {"codes": f"tensordesc<i8[{tile.rows}, {block_k}],{layout(tile.rows)!r}>", "scale": "*fp32"}
    signature |= {"w": f"tensordesc<i8[{tile.n}, {block_k}],{layout(tile.n)!r}>", "w_scale": "*fp32", "out": f"*{out}"}
    constants: dict[str, Any] = {"K": k, "GROUP": linear_8bit.GROUP, "STAGES": tile.stages, "PDL": True}
    constants["num_warps"] = tile.warps
    for name, is_given in (("bias", with_bias), ("residual", with_residual)):
        if is_given:
            signature[name] = "*bf16"
        else:
            constants[name] = None
    signature |= {"M": "i32", "N": "i32"}
    options = {"num_warps": tile.warps, "launch_pdl": True}
    return compile_kernel(linear_int8_async.int8_kernel, signature, constants, options)


def products_in_flight(wanted: str) -> list[bool]:
    """The tiles of the kernel in Gluon that any table has."""
    tables = [runtime.read_tiles(path) for path in (Path(runtime.__file__).parent / "tuned").glob("*.json")]
    used = {(k, tile) for table in tables for (_, _, k, _), tile in table.items() if tile.k == 0 < tile.rows}
    results = []
    for k, tile in sorted(used):
        for out, with_bias, with_residual in (
            ("bf16", False, False), ("bf16", False, True), ("bf16", True, True), ("fp32", False, False),
            ("fp32", True, False),
        ):  # fmt: skip
            name = f"int8 in flight {k} {tuple(tile)} {out}{' bias' * with_bias}{' residual' * with_residual}"
            if wanted in name:
                results.append(report(name, in_flight(tile, k, out, with_bias, with_residual), "wgmma"))
    return results


def rows(wanted: str) -> list[bool]:
    results = []
    for width in (576, 1024, 4096, 8192, 14336):
        for is_alone in (False, True):
            for kind in (None, "int8", "fp8"):
                if wanted in f"rows {width} {kind}":
                    results += row_kernels(width, is_alone, kind)
    return results


def row_kernels(width: int, is_alone: bool, kind: str | None) -> list[bool]:
    """Norm, activation and rounding of rows; `kind` None for those that round nothing to 8 bits."""
    results = []
    block, warps = quantize.row_launch(width, is_alone)
    options = {"num_warps": warps, "launch_pdl": True}
    label = f"{width} {kind} {warps}"
    common = {"x": "*bf16", "width": "i32", "x_stride": "i32"}
    constants: dict[str, Any] = {"BLOCK": block, "KIND": kind, "PDL": True, "NATIVE": True}
    if kind is None:
        common |= {"out": "*bf16"}
        constants |= {"scale": None}
    else:
        common |= {"out": "*i8" if kind == "int8" else "*fp8e4nv", "scale": "*fp32"}
    scales = [({}, {"x_row": None, "x_column": None})]
    if kind == "fp8":  # only products of FP8 leave their scales
        scales.append(({"x_row": "*fp32", "x_column": "*fp32"}, {}))
    for given, none in scales:
        with_scales = " with scales" if given else ""
        norm = common | given | {"residual": "*bf16", "weight": "*bf16", "eps": "fp32"}
        compiled = compile_kernel(elementwise.norm_kernel, norm, constants | none, options)
        results.append(report(f"norm {label}{with_scales}", compiled))
        gate = constants | none | {"GATE": "silu"}
        compiled = compile_kernel(elementwise.gate_kernel, common | given, gate, options)
        results.append(report(f"gate {label}{with_scales}", compiled))
        if kind is not None:
            gate |= {"PARTS": -(-width // elementwise.PART), "BLOCK": elementwise.PART}
            compiled = compile_kernel(elementwise.gate_parts_kernel, common | given, gate, options | {"num_warps": 8})
            results.append(report(f"gate in parts {label}{with_scales}", compiled))
    if kind is not None:
        signature = {("codes" if name == "out" else name): of for name, of in common.items()}
        compiled = compile_kernel(quantize.quantize_kernel, signature, constants | {"fixed": None}, options)
        results.append(report(f"quantize {label}", compiled))
        compiled = compile_kernel(quantize.quantize_kernel, signature | {"fixed": "fp32"}, constants, options)
        results.append(report(f"quantize by a static scale {label}", compiled))
    return results


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    results = rows(wanted) + products(wanted) + products_in_flight(wanted)
    print(f"{sum(results)} of {len(results)} kernels are as they should be")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
