"""Ways of multiplying 8-bit rows, for many numbers of rows: microseconds a layer of Llama-3.1-8B and their errors.

    python benchmarks/gpu_rows8.py [--kinds w8a8,fp8] [--rows 8,16,32,64,128,256,512,2048] [--stacks 8,32,128,256]
                                   [--json PATH]

"table" is what Octavo takes; for FP8 beside it torch's product with the scales of rows, and without them, which sums
within the matrix units or in float32 ("exact sums"). Each is checked against sums in float64 (the largest error of the
four shapes is printed). At the end whole layers, with the kernels between the products. Weights do not fit the
second-level cache together, and all is timed in CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_linear8 import SHAPES, Case, microseconds
from gpu_stack8 import time_stack
from torch import Tensor

from octavo.ops.compile_ahead import compile_ahead
from octavo.ops.triton import linear_8bit
from octavo.ops.triton.linear_8bit_parts import apply_scales
from octavo.ops.triton.scaled import Scaled

Way = Callable[[Tensor, Tensor, Tensor, Tensor], "Tensor | Scaled"]


def table(codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor | Scaled:
    return linear_8bit.linear_for_reader(codes, scale, w, w_scale)


def with_scales(codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor | Scaled:
    return linear_8bit.scaled_mm(codes, scale, w, w_scale, None)


def exact_sums(codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor | Scaled:
    one = torch.ones((), device=codes.device)
    values = torch._scaled_mm(codes, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=False)
    return Scaled(values, scale, w_scale)


WAYS: dict[str, dict[str, Way]] = {
    "w8a8": {"table": table},
    "fp8": {
        "table": table,
        "torch, scales": with_scales,
        "torch, no scales": linear_8bit.unscaled_mm,
        "exact sums": exact_sums,
    },
}


def error_of(case: Case, way: Way, rows: int) -> float:
    """Relative error against float64, on a thousand columns."""
    y = way(case.codes[:rows], case.scale[:rows], case.w, case.w_scale)
    whole = apply_scales(y) if isinstance(y, Scaled) else y
    exact = case.exact[:rows]
    return float((whole[:, case.columns].double() - exact).norm() / exact.norm())


def time_of(case: Case, way: Way, rows: int) -> float:
    codes, scale = case.codes[:rows], case.scale[:rows]
    return microseconds(lambda copy: way(codes, scale, case.copies[copy % len(case.copies)], case.w_scale), case.calls)


def measure(kind: str, rows: list[int]) -> list[dict[str, object]]:
    """Times of the four shapes for each way and number of rows."""
    cases = [Case(kind, n, k) for n, k in SHAPES.values()]
    compile_ahead(lambda: [table(c.codes[:m], c.scale[:m], c.w, c.w_scale) for c in cases for m in rows])
    results = []
    for m in rows:
        for name, way in WAYS[kind].items():
            error = max(error_of(case, way, m) for case in cases)
            spent = [time_of(case, way, m) for case in cases]
            rate = 2 * m * sum(n * k for n, k in SHAPES.values()) / sum(spent) / 1e6
            parts = " ".join(f"{time:6.1f}" for time in spent)
            print(
                f"{kind:5}{m:6} {name:17}{sum(spent):8.1f} us [{parts}]{rate:6.0f} TOP/s  error {error:.1e}", flush=True
            )
            results.append({"kind": kind, "rows": m, "way": name, "microseconds": spent, "error": error})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="w8a8,fp8", help="kinds to measure")
    parser.add_argument("--rows", default="8,16,32,64,128,256,512,2048", help="numbers of rows of the products")
    parser.add_argument("--stacks", default="8,32,128,256", help="numbers of rows of whole layers")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    results = []
    for kind in arguments.kinds.split(","):
        results += measure(kind, [int(rows) for rows in arguments.rows.split(",")])
        torch.cuda.empty_cache()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results))
    for kind in arguments.kinds.split(","):
        for rows in filter(None, arguments.stacks.split(",")):
            time_stack(kind, int(rows))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
