"""Products of few rows with 4-bit codes, thread by thread under the emulator, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.ops.cuda import compiler, linear_w4
from octavo.ops.cuda.linear_w4 import Shape, Sizes
from octavo.ops.triton.linear_w4 import pack_codes

HERE = Path(__file__).parent
SOURCES = Path(linear_w4.__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
needs_gpu = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))

EPS = 1e-5
CASES = [
    # rows, rows of W, columns, group, norm, gate, bias, residual, out, sizes
    (3, 96, 640, 128, False, None, True, False, torch.bfloat16, Sizes(2, 2, 2, 2, 1)),
    (1, 64, 512, 64, True, "silu", False, False, torch.bfloat16, Sizes(2, 4, 3, 1, 1)),
    (8, 160, 768, 32, False, None, False, True, torch.float32, Sizes(1, 2, 2, 3, 2)),
    (12, 128, 1024, 256, True, "gelu_tanh", True, False, torch.bfloat16, Sizes(4, 3, 2, 2, 1)),
    (5, 64, 384, 128, False, None, True, True, torch.float32, Sizes(1, 1, 3, 1, 3)),
    (2, 32, 256, 256, False, None, False, False, torch.bfloat16, Sizes(2, 2, 2, 1, 1)),  # one scale a row
    (16, 96, 256, 128, True, None, True, True, torch.float32, Sizes(4, 2, 2, 2, 1)),
]


def problem(rows: int, n: int, k: int, group: int) -> tuple[Any, Tensor, Tensor]:
    """A weight as the kernels read it, the same in float32, and x."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scale = torch.rand(n, k // group, generator=generator) / k**0.5 + 0.01
    words = pack_codes(codes[:, ::2] | codes[:, 1::2] << 4)
    weight = SimpleNamespace(
        shape=(n, k), kind="int4", groups=k // group, data=words, scale=scale, offset=None,
        unit_scales=linear_w4.pack_scales(scale, k),
    )  # fmt: skip
    exact = ((codes.float() - 8).view(n, k // group, group) * scale[..., None]).view(n, k)
    return weight, exact, torch.randn(rows, k, generator=generator).bfloat16()


def expected(
    x: Tensor, exact: Tensor, norm: Tensor | None, bias: Tensor | None, gate: str | None, residual: Tensor | None
) -> Tensor:
    rows = x.float()
    if norm is not None:  # as the kernel rounds it
        inverse = (rows.square().mean(dim=1, keepdim=True) + EPS).rsqrt()
        rows = (rows * inverse * norm.float()).bfloat16().float()
    y = rows @ exact.T + (0 if bias is None else bias.float())
    if gate is not None:
        first, second = y.chunk(2, dim=1)
        y = (F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")) * second
    return y if residual is None else y + residual.float()


def extras(
    rows: int, n: int, k: int, has_norm: bool, gate: str | None, has_bias: bool, has_residual: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Norm, bias and residual."""
    generator = torch.Generator().manual_seed(5)
    norm = torch.randn(k, generator=generator).bfloat16() if has_norm else None
    bias = torch.randn(n, generator=generator).bfloat16() if has_bias else None
    width = n if gate is None else n // 2
    return norm, bias, torch.randn(rows, width, generator=generator).bfloat16() if has_residual else None


def compiled(shape: Shape, sizes: Sizes, out_float: bool, folder: Path) -> ctypes.CDLL:
    library = folder / "kernel.so"
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{HERE}", f"-I{SOURCES}"]
    defines = [f"-D{name}={value}" for name, value in shape.macros(sizes, out_float).items()]
    subprocess.run(["g++", *options, *defines, str(HERE / "few_rows_w4_emulated.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def relative_error(out: Tensor, wanted: Tensor) -> float:
    return float((out.float() - wanted).norm() / wanted.norm())


def run_emulated(
    x: Tensor, weight: Any, norm: Tensor | None, bias: Tensor | None, gate: str | None, residual: Tensor | None,
    out_dtype: torch.dtype, sizes: Sizes, folder: Path,
) -> Tensor:  # fmt: skip
    """As `linear_w4.few_rows`; room for x, sums and results are NaN before."""
    rows, n = x.shape[0], weight.shape[0] if gate is None else weight.shape[0] // 2
    shape = linear_w4.shape_of(rows, weight, norm is not None, gate is not None)
    out = torch.full((rows, n), torch.nan, dtype=out_dtype)
    jobs = sizes.blocks * shape.passes(sizes)
    partial = torch.full((jobs * sizes.parts * rows * sizes.mt * 16,), torch.nan)
    counters = torch.zeros(jobs, dtype=torch.int32)
    library = compiled(shape._replace(rows=shape.room), sizes, out_dtype == torch.float32, folder)
    row_scale = weight.scale if weight.unit_scales is None else None
    tensors = (weight.data, x, weight.unit_scales, row_scale, norm, bias, residual, out, partial, counters)
    numbers = (rows, n, shape.units, shape.units_a_part(sizes), int(gate == "gelu_tanh"), ctypes.c_float(EPS))
    library.run(sizes.blocks, sizes.parts, shape.shared_bytes(sizes), *map(pointer, tensors), *numbers)
    assert not counters.any()
    return out


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "n", "k", "group", "has_norm", "gate", "has_bias", "has_residual", "out_dtype", "sizes"), CASES
)
def test_every_thread_does_its_part(
    rows: int, n: int, k: int, group: int, has_norm: bool, gate: str | None, has_bias: bool, has_residual: bool,
    out_dtype: torch.dtype, sizes: Sizes, tmp_path: Path,
) -> None:  # fmt: skip
    weight, exact, x = problem(rows, n, k, group)
    norm, bias, residual = extras(rows, n, k, has_norm, gate, has_bias, has_residual)
    out = run_emulated(x, weight, norm, bias, gate, residual, out_dtype, sizes, tmp_path)
    wanted = expected(x, exact, norm, bias, gate, residual)
    assert relative_error(out, wanted) < (0.004 if out_dtype == torch.bfloat16 else 1e-4)


@needs_compiler
def test_inputs_keep_what_is_far_below_the_largest(tmp_path: Path) -> None:
    """16 bits from the largest of 128 columns down; another unit has a scale of its own, a row of zeros stays zero."""
    weight, exact, x = problem(3, 32, 256, 128)
    x[0, 5] = 3e4
    x[1] = 0
    x[2, :128] *= 1e-30
    out = run_emulated(x, weight, None, None, None, None, torch.float32, Sizes(2, 2, 2, 1, 1), tmp_path)
    wanted = expected(x, exact, None, None, None, None)
    assert float((out[0] - wanted[0]).abs().max()) < 3e4 / 32512 * float(exact[:, :128].abs().sum(1).max())
    assert not out[1].any()
    assert relative_error(out[2], wanted[2]) < 1e-4


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_shows_in_its_row_alone(value: float, tmp_path: Path) -> None:
    weight, exact, x = problem(2, 32, 256, 128)
    x[1, 200] = value
    out = run_emulated(x, weight, None, None, None, None, torch.float32, Sizes(2, 2, 2, 1, 1), tmp_path)
    assert relative_error(out[:1], expected(x[:1], exact, None, None, None, None)) < 1e-4
    assert not torch.isfinite(out[1]).any()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("group", [32, 64, 128, 4096])
def test_products_on_the_gpu(rows: int, has_norm: bool, gate: str | None, group: int) -> None:
    weight, exact, x = problem(rows, 1536, 4096, group)
    norm, bias, residual = extras(rows, 1536, 4096, has_norm, gate, True, True)
    wanted = expected(x, exact, norm, bias, gate, residual)
    for name in ("data", "scale", "unit_scales"):
        tensor = getattr(weight, name)
        setattr(weight, name, None if tensor is None else tensor.cuda())
    norm, bias, residual = (None if tensor is None else tensor.cuda() for tensor in (norm, bias, residual))
    for early in (False, True):
        out = linear_w4.few_rows(x.cuda(), weight, bias, torch.float32, norm, EPS, gate, residual, early)
        assert relative_error(out.cpu(), wanted) < (3e-3 if has_norm else 1e-4)  # a norm may round another way


def test_sizes_leave_a_ring_and_few_parts() -> None:
    """The products of an 8B model on 132 multiprocessors: fused q, k and v; output; gate and up; down."""
    shapes = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False))
    for rows, parts, tiles in (
        (1, (1, 1, 1, 1), (4, 2, 4, 2)),
        (8, (1, 1, 1, 2), (4, 2, 4, 4)),
        (16, (1, 1, 1, 4), (2, 2, 2, 2)),
    ):
        found = [linear_w4.sizes_for(Shape(rows, n, k // 128, 1, False, gated), 132) for n, k, gated in shapes]
        assert tuple(sizes.parts for sizes in found if sizes) == parts
        assert tuple(sizes.mt for sizes in found if sizes) == tiles
        assert all(sizes and sizes.stages >= 2 for sizes in found)
    assert linear_w4.sizes_for(Shape(16, 4096, 112, 1, True, False), 132) is None  # x with its norm does not fit


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 16), st.integers(1, 2000), st.integers(1, 512), st.sampled_from([0, 1, 2, 4]), st.booleans(),
    st.booleans(), st.integers(1, 200),
)  # fmt: skip
def test_sizes_fit_every_shape(
    rows: int, pairs: int, units: int, scales: int, normed: bool, gated: bool, multiprocessors: int
) -> None:
    shape = Shape(rows, 32 * pairs, units, scales, normed, gated)
    sizes = linear_w4.sizes_for(shape, multiprocessors)
    if sizes is None:
        assert normed
        return
    assert shape.shared_bytes(sizes) <= 226 << 10
    assert sizes.blocks * sizes.parts <= max(multiprocessors, sizes.parts)
    assert (sizes.parts - 1) * shape.units_a_part(sizes) < units <= sizes.parts * shape.units_a_part(sizes)


def test_a_program_holds_what_it_includes() -> None:
    source = compiler.read_source(SOURCES / "few_rows_w4.cu")
    assert b'#include "' not in source
    assert b"void split_inputs(" in source and b"void mma_int8(" in source
