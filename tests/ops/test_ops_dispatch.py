"""The choice among candidates, and the library that may be missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.ops.cpu import library
from octavo.ops.dispatch import Candidate, Operation

needs_kernels = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))


def twice(x: Tensor) -> Tensor:
    return x * 2


def only_large(x: Tensor) -> Any:
    return x + x if x.numel() > 4 else NotImplemented


def test_the_first_candidate_that_serves_runs() -> None:
    calls = []

    def fast(x: Tensor) -> Tensor:
        calls.append(x.dtype)
        return x + x

    operation = Operation("double", Candidate("fast", fast, ("cpu",), (torch.bfloat16,)), Candidate("torch", twice))
    assert operation(torch.ones(2)).tolist() == [2, 2]
    assert operation(torch.ones(2, dtype=torch.bfloat16)).tolist() == [2, 2]
    assert calls == [torch.bfloat16]


def test_a_candidate_may_pass() -> None:
    operation = Operation("double", Candidate("large", only_large), Candidate("torch", twice))
    assert operation(torch.ones(2)).tolist() == [2, 2]
    assert operation(torch.ones(5)).sum() == 10
    with pytest.raises(NotImplementedError, match="double"):
        Operation("double", Candidate("large", only_large))(torch.ones(2))


def test_report_says_who_runs_and_why_others_do_not() -> None:
    operation = Operation(
        "double",
        Candidate("gpu", twice, ("cuda",)),
        Candidate("missing", twice, unavailable="not built"),
        Candidate("half", twice, dtypes=(torch.float16,)),
        Candidate("torch", twice, note="the reference"),
        Candidate("slower", twice),
    )
    assert operation.report("cpu", torch.float32) == [
        ("double", "gpu", False, "serves cuda, not cpu"),
        ("double", "missing", False, "not built"),
        ("double", "half", False, "serves float16"),
        ("double", "torch", True, "the reference"),
        ("double", "slower", False, "a faster one serves this"),
    ]


def test_every_operation_has_exactly_one_choice() -> None:
    rows = ops.report()
    operations = {row[0] for row in rows}
    assert operations >= {"linear", "rms_norm", "paged_attention", "rotary_and_store", "silu_mul"}
    for operation in operations - {"linear"}:
        assert sum(row[2] for row in rows if row[0] == operation) == 1
    assert all(reason for _, _, _, reason in rows)


SCRIPT = """
import torch
from octavo import ops
from octavo.ops.cpu import library
print(library.unavailable())
x = torch.ones(2, 32, dtype=torch.bfloat16)
print(ops.rms_norm(x, x[0].clone(), 0.0).float().mean().item())
print(ops.pack_weight(x, torch.bfloat16).name)
print(ops.KVCache.allocate(2, 16, 1, 64, torch.bfloat16).interleaved)
"""


def run(script: str, **environment: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return result.stdout.split("\n")


def test_kernels_can_be_switched_off() -> None:
    lines = run(SCRIPT, OCTAVO_DISABLE_CPU_KERNELS="1")
    assert lines[:4] == ["switched off by OCTAVO_DISABLE_CPU_KERNELS", "1.0", "torch dense", "False"]


def test_torch_limited_to_avx2_changes_nothing() -> None:
    lines = run(SCRIPT, ATEN_CPU_CAPABILITY="avx2")
    assert lines[1] == "1.0"
    assert lines[0] == str(library.unavailable())


@needs_kernels
def test_read_visits_every_byte() -> None:
    assert library.read(torch.ones(3 * 2**16, dtype=torch.int64)) == 3 * 2**16


@needs_kernels
def test_one_openmp_runtime_is_mapped() -> None:
    """Two copies would mean two pools of threads on the same cores."""
    script = "from octavo import ops\nprint(len({l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l}))"
    assert run(script)[0] == "1"


def test_opening_a_library_runs_none_of_its_code() -> None:
    """Its files are compiled for AVX2 or AVX-512: a constructor in one kills a process on a CPU without."""
    files = [path for name in library.LIBRARIES if (path := Path(library.__file__).parent / name).exists()]
    if not files or shutil.which("nm") is None:
        pytest.skip("the kernels were not built, or binutils' nm is not there")
    for file in files:
        symbols = subprocess.run(["nm", str(file)], capture_output=True, text=True, check=True).stdout
        assert "octavo_cpu_level" in symbols
        assert "_GLOBAL__sub_I" not in symbols


@needs_kernels
def test_the_variable_that_limits_torch_limits_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    file = next(path for name in library.LIBRARIES[::-1] if (path := Path(library.__file__).parent / name).exists())
    for value, level in (("AVX2", 1), ("AVX512_CORE_BF16", 2), ("AVX10_1_512", 2), ("AVX512_CORE_AMX", 3), ("ALL", 3)):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", value)
        assert library._allowed_level() == level
        assert library._open(file)[1] is None
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX")
    assert "ONEDNN_MAX_CPU_ISA" in str(library._open(file)[1])
