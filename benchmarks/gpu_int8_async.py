"""A candidate kernel for int8 products of many rows, in Gluon: checked and timed beside the present one.

    python benchmarks/gpu_int8_async.py [--rows 64,128,256,512,2048,8192] [--json PATH]
    python benchmarks/gpu_int8_async.py --compile

Triton waits for every tile of an int8 product before it asks for the next (its pipeliner keeps only sums of float32 in
flight), FP8's not. Gluon leaves the waiting to the kernel: here one tile of K stays in flight. `--compile` compiles for
compute capability 9.0 without a GPU, and prints the waits that came out.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
import triton
from gpu_linear8 import SHAPES, Case, microseconds
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import linear_8bit, runtime

BLOCK_K, GROUP = 128, 8
SIZES = ((128, 128, 5, 8), (128, 128, 3, 4), (128, 256, 3, 8), (64, 128, 6, 4), (64, 256, 4, 4), (256, 128, 3, 8))


@gluon.jit
def _corner(step, first, programs, blocks_m, blocks_n, TK: gl.constexpr, GROUP: gl.constexpr):
    tile = first + step // TK * programs
    group = tile // (GROUP * blocks_n)
    height = gl.minimum(blocks_m - group * GROUP, GROUP)
    inner = tile % (GROUP * blocks_n)
    return group * GROUP + inner % height, inner // height


@gluon.jit
def _fetch(
    codes,
    w,
    full,
    x_tiles,
    w_tiles,
    step,
    steps,
    first,
    programs,
    blocks_m,
    blocks_n,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    TK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    block_m, block_n = _corner(step, first, programs, blocks_m, blocks_n, TK, GROUP)
    stage, column, live = step % STAGES, step % TK * BK, step < steps
    bar = full.index(stage)
    mbarrier.expect(bar, (BM + BN) * BK, pred=live)
    tma.async_copy_global_to_shared(codes, [block_m * BM, column], bar, x_tiles.index(stage), pred=live)
    tma.async_copy_global_to_shared(w, [block_n * BN, column], bar, w_tiles.index(stage), pred=live)


@gluon.jit(do_not_specialize=["M"])
def kernel(
    codes,
    scale,
    w,
    w_scale,
    out,
    M,
    N,
    K: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    TK: gl.constexpr = (K + BK - 1) // BK
    x_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, BM, BK], codes.layout)
    w_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, BN, BK], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    blocks_m, blocks_n = (M + BM - 1) // BM, (N + BN - 1) // BN
    tiles, first, programs = blocks_m * blocks_n, gl.program_id(0), gl.num_programs(0)
    steps = (tiles - first + programs - 1) // programs * TK
    for i in gl.static_range(STAGES - 1):
        _fetch(
            codes,
            w,
            full,
            x_tiles,
            w_tiles,
            i,
            steps,
            first,
            programs,
            blocks_m,
            blocks_n,
            BM,
            BN,
            BK,
            TK,
            GROUP,
            STAGES,
        )
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, min(BN, 128), 32])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    step = steps * 0
    for _ in range(first, tiles, programs):
        acc = gl.zeros([BM, BN], gl.int32, mma)
        block_m, block_n = _corner(step, first, programs, blocks_m, blocks_n, TK, GROUP)
        for k in range(0, TK):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            weight = w_tiles.index(stage).permute((1, 0))
            acc = warpgroup_mma(x_tiles.index(stage), weight, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])  # the tile before is read: its place is free
            _fetch(
                codes, w, full, x_tiles, w_tiles, step + STAGES - 1, steps, first, programs, blocks_m, blocks_n, BM, BN,
                BK, TK, GROUP, STAGES,
            )  # fmt: skip
            step += 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        m = block_m * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, mma))
        n = block_n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, mma))
        y = total.to(gl.float32) * gl.load(w_scale + n, mask=n < N, other=0)[None, :]
        y = (y * gl.load(scale + m, mask=m < M, other=0)[:, None]).to(out.dtype.element_ty)
        y = gl.convert_layout(y, rows)
        m = block_m * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, rows))
        n = block_n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, rows))
        gl.store(out + m.to(gl.int64)[:, None] * N + n[None, :], y, mask=(m < M)[:, None] & (n < N)[None, :])


def layout_of(rows: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, BLOCK_K], gl.int8)


def launch(
    codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, size: tuple[int, int, int, int], pdl: bool = True
) -> Tensor:
    block_m, block_n, stages, warps = size
    (rows, k), n = codes.shape, w.shape[0]
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=codes.device)
    programs = min(-(-rows // block_m) * -(-n // block_n), 132 * (2 if warps == 4 and block_m == 128 else 1))
    kernel[(programs,)](
        TensorDescriptor(codes, [rows, k], [k, 1], [block_m, BLOCK_K], layout_of(block_m)), scale,
        TensorDescriptor(w, [n, k], [k, 1], [block_n, BLOCK_K], layout_of(block_n)), w_scale, out, rows, n, k,
        block_m, block_n, BLOCK_K, GROUP, stages, pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def compile_only(size: tuple[int, int, int, int], k: int = 4096) -> None:
    """Compiles one size without a GPU and prints what came out."""
    block_m, block_n, stages, warps = size
    names = kernel.arg_names
    signature = {
        "codes": f"tensordesc<i8[{block_m}, {BLOCK_K}],{layout_of(block_m)!r}>",
        "w": f"tensordesc<i8[{block_n}, {BLOCK_K}],{layout_of(block_n)!r}>",
        "scale": "*fp32", "w_scale": "*fp32", "out": "*bf16", "M": "i32", "N": "i32",
    }  # fmt: skip
    constants = {"K": k, "BM": block_m, "BN": block_n, "BK": BLOCK_K, "GROUP": GROUP, "STAGES": stages, "PDL": True}
    constants["num_warps"] = warps
    given = {name: signature.get(name, "constexpr") for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or name == "N"
    }
    source = GluonASTSource(kernel, given, fixed, aligned)
    options = {"num_warps": warps, "launch_pdl": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    waits = re.findall(r"wgmma.wait_group.sync.aligned (\d)", ptx)
    print(size, f"{compiled.metadata.shared >> 10} KiB, waits {waits}, {ptx.count('wgmma.mma_async')} products")


def measure(rows: int, cases: dict[str, Case]) -> list[dict[str, object]]:
    results = []
    for name, case in cases.items():
        codes, scale = case.codes[:rows], case.scale[:rows]
        expected = linear_8bit.linear_8bit(codes, scale, case.w, case.w_scale, None, torch.bfloat16)
        old = case.time(rows, linear_8bit.tile_8bit("w8a8", case.n, case.k, rows))
        line = f"{rows:5} {name:8} now {old:8.1f} us"
        for size in SIZES:
            try:
                equal = torch.equal(launch(codes, scale, case.w, case.w_scale, size), expected)
            except Exception as error:  # a size that does not run here: said, and the others are timed
                line += f"  {size[:2]} {type(error).__name__}"
                continue

            def call(copy: int, size: tuple[int, int, int, int] = size) -> Tensor:
                return launch(codes, scale, case.copies[copy % len(case.copies)], case.w_scale, size)  # noqa: B023

            spent = microseconds(call, case.calls)
            line += f"  {size} {spent:.1f}{'' if equal else ' WRONG'}"
            results.append({"rows": rows, "name": name, "size": size, "us": spent, "equal": equal, "now": old})
        print(line, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="64,128,256,512,2048,8192", help="numbers of rows")
    parser.add_argument("--compile", action="store_true", help="only compile, without a GPU")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if arguments.compile:
        for size in SIZES:
            compile_only(size)
        return
    assert runtime.has_dependent_launch(torch.device("cuda"))
    cases = {name: Case("w8a8", n, k) for name, (n, k) in SHAPES.items()}
    results = [result for rows in arguments.rows.split(",") for result in measure(int(rows), cases)]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
