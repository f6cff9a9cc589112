"""int8 products of many rows with tiles in flight (Gluon) beside those of Triton: same bits, and the times.

    python benchmarks/gpu_int8_async.py [--rows 128,256,512,2048,8192] [--json PATH]

"Triton" is the default tile of `many_rows_kernel`, "table" what the product takes. `compile_8bit.py "in flight"`
compiles the kernel without a GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from gpu_linear8 import ASYNC, SHAPES, Case
from torch import Tensor

from octavo.ops.triton import linear_8bit
from octavo.ops.triton.linear_8bit_parts import has_async
from octavo.ops.triton.runtime import Tile


def product(case: Case, rows: int, tile: Tile, out_dtype: torch.dtype) -> Tensor:
    codes, scale = case.codes[:rows], case.scale[:rows]
    return linear_8bit.linear_8bit(codes, scale, case.w, case.w_scale, None, out_dtype, tile=tile)


def measure(rows: int, cases: dict[str, Case]) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for name, case in cases.items():
        key = linear_8bit.bucket(rows)
        triton_tile = linear_8bit.default_tile(case.n, case.k, key)
        table = linear_8bit.tile_8bit("w8a8", case.n, case.k, rows)
        expected = [product(case, rows, triton_tile, dtype) for dtype in (torch.bfloat16, torch.float32)]
        line = f"{rows:5} {name:8} Triton {case.time(rows, triton_tile):7.1f} us"
        line += f"  table {case.time(rows, table):7.1f} us {tuple(table)} "
        for sizes in ASYNC:
            tile = linear_8bit.async_tile(*sizes)
            equal = all(torch.equal(product(case, rows, tile, y.dtype), y) for y in expected)
            spent = case.time(rows, tile)
            line += f"  {sizes} {spent:.1f}{'' if equal else ' WRONG'}"
            results.append({"rows": rows, "name": name, "tile": tile, "us": spent, "equal": equal})
        print(line, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="128,256,512,2048,8192", help="numbers of rows")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    assert has_async(torch.device("cuda")), "the kernel does not serve this GPU with this release of Triton"
    cases = {name: Case("w8a8", n, k) for name, (n, k) in SHAPES.items()}
    results = [result for rows in arguments.rows.split(",") for result in measure(int(rows), cases)]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
