"""Every product of few rows fits the shared memory of a program."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.ops.triton import linear, runtime

Case = tuple[str, int, int, int, int, bool, bool]
COMPILED: list[Case] = [  # kind, n, k, rows, group, has offset, is gated
    ("int4", 320, 96, 16, 32, True, False),
    ("int4", 320, 96, 16, 32, True, True),
    ("int4", 3072, 576, 32, 64, True, True),
    ("int4", 49152, 576, 16, 64, True, False),
    ("int4", 28672, 4096, 256, 128, True, True),
    ("int4", 3072, 576, 64, 32, False, True),
    ("int8", 960, 576, 16, 32, True, True),
    ("int8", 49152, 576, 32, 576, True, False),
    ("bf16", 576, 1536, 16, 1536, False, False),
    ("bf16", 49152, 576, 32, 576, False, True),
]


def test_the_bound_holds_for_compiled_products() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    lines = "\n".join(json.dumps(case) for case in COMPILED)
    command = [sys.executable, str(Path(__file__).with_name("shared_memory.py"))]
    run = subprocess.run(command, input=lines, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    sizes = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(sizes) == len(COMPILED)
    for case, (size, bound) in zip(COMPILED, sizes, strict=True):
        assert 0 < size <= bound <= runtime.MAX_SHARED, (case, size, bound)


def cases(kind: str) -> list[Case]:
    shapes = itertools.product((40, 96, 320, 960, 3072, 6144, 28672, 49152, 128256), (96, 160, 576, 1536, 4096, 14336))
    groups = (None,) if kind == "bf16" else (32, 64, 128, None)
    options = itertools.product(groups, (False,) if kind == "bf16" else (False, True), (False, True))
    every = itertools.product(shapes, runtime.BUCKETS, options)
    return [
        (kind, n, k, rows, group or k, offset, gate)
        for (n, k), rows, (group, offset, gate) in every
        if k % (group or k) == 0
    ]


@pytest.mark.parametrize("kind", ["bf16", "int4", "int8"])
def test_the_bound_fits_for_every_default_and_measured_tile(kind: str) -> None:
    tables = (Path(runtime.__file__).parent / "tuned").glob("*.json")
    measured = {key: tile for table in tables for key, tile in runtime.read_tiles(table).items() if key[0] == kind}
    default = {(kind, n, k, rows): runtime.default_tile(kind, n, k, rows) for _, n, k, rows, *_ in cases(kind)}
    todo = [(case, default[case[:4]]) for case in cases(kind)]
    for (_, n, k, rows), tile in measured.items():
        groups = (k,) if kind == "bf16" else (32, 128, k)
        for group, offset, gate in itertools.product(groups, {False, kind != "bf16"}, (False, True)):
            todo += [((kind, n, k, rows, group, offset, gate), tile)] if tile.split else []
    assert len(todo) > 500
    for (_, n, k, rows, group, offset, gate), tile in todo:
        unit = 128 if kind == "int4" else 32
        block_k = linear._plan(tile, kind, k, unit, k // group)[0]
        stages = runtime.stages(tile, block_k, kind, group, offset, gate)
        assert 1 <= stages <= tile.stages
        size = runtime.shared_bytes(tile, block_k, kind, group, offset, gate, stages)
        assert size <= runtime.MAX_SHARED, (kind, n, k, rows, group, offset, gate, tile)
        if not offset and group % 128 == 0 and not gate:
            assert stages == tile.stages  # the bound takes nothing from what was measured
