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
from torch import Tensor

from octavo.ops.cuda import compiler, linear_w4
from octavo.ops.cuda.linear_w4 import Sizes
from octavo.ops.triton.linear_w4 import pack_codes

HERE = Path(__file__).parent
SOURCES = Path(linear_w4.__file__).parent
needs_gpu = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))

EPS = 1e-5
CASES = [
    # rows, rows of W, columns, group, norm, gate, bias, residual, out, sizes
    (3, 70, 256, 128, False, None, True, False, torch.bfloat16, Sizes(1, 2, 1, 2, 2, 4, 1)),
    (8, 128, 640, 32, True, None, False, True, torch.float32, Sizes(1, 2, 2, 2, 2, 4, 2)),  # the last part is shorter
    (11, 96, 512, 64, True, "silu", True, True, torch.bfloat16, Sizes(2, 2, 1, 2, 2, 4, 1)),
    (20, 64, 1024, 256, False, "gelu_tanh", False, False, torch.bfloat16, Sizes(4, 1, 2, 2, 4, 8, 3)),
    (1, 48, 384, 384, True, None, False, False, torch.bfloat16, Sizes(1, 1, 2, 1, 3, 3, 1)),  # one scale a row
    (64, 32, 256, 128, False, None, False, False, torch.bfloat16, Sizes(8, 1, 1, 2, 1, 2, 1)),
]


def problem(rows: int, n: int, k: int, group: int) -> tuple[Any, Tensor, Tensor]:
    """A weight as the kernels read it, the same in float32, and x."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scale = torch.rand(n, k // group, generator=generator) / k**0.5 + 0.01
    words = pack_codes(codes[:, ::2] | codes[:, 1::2] << 4)
    weight = SimpleNamespace(shape=(n, k), kind="int4", groups=k // group, data=words, scale=scale, offset=None)
    exact = ((codes.float() - 8).view(n, k // group, group) * scale[..., None]).view(n, k)
    return weight, exact, torch.randn(rows, k, generator=generator).bfloat16()


def expected(
    x: Tensor, exact: Tensor, norm: Tensor | None, bias: Tensor | None, gate: str | None, residual: Tensor | None
) -> Tensor:
    rows = x.float()
    if norm is not None:  # as the kernel rounds it
        inverse = (rows.square().mean(dim=1, keepdim=True) + EPS).rsqrt()
        rows = (rows * norm.float()).bfloat16().float() * inverse
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


def compiled(
    sizes: Sizes, group_steps: int, normed: bool, gate: str | None, out: torch.dtype, folder: Path
) -> ctypes.CDLL:
    macros = linear_w4.macros(sizes, group_steps, normed, gate is not None, out == torch.float32)
    library = folder / "kernel.so"
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{HERE}", f"-I{SOURCES}"]
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run(["g++", *options, *defines, str(HERE / "few_rows_w4_emulated.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("rows", "n", "k", "group", "has_norm", "gate", "has_bias", "has_residual", "out_dtype", "sizes"), CASES
)
def test_every_thread_does_its_part(
    rows: int, n: int, k: int, group: int, has_norm: bool, gate: str | None, has_bias: bool, has_residual: bool,
    out_dtype: torch.dtype, sizes: Sizes, tmp_path: Path,
) -> None:  # fmt: skip
    weight, exact, x = problem(rows, n, k, group)
    norm, bias, residual = extras(rows, n, k, has_norm, gate, has_bias, has_residual)
    outputs = n if gate is None else n // 2
    tiles = -(-outputs // (sizes.rows if gate is None else sizes.rows // 2))
    units, out = k // 128, torch.full((rows, outputs), torch.nan, dtype=out_dtype)
    partial, counters = (
        torch.empty(tiles * sizes.parts * 8 * sizes.nt * (sizes.rows + 1)),
        torch.zeros(tiles, dtype=torch.int32),
    )
    library = compiled(sizes, linear_w4.steps_a_group(k, weight.groups), has_norm, gate, out_dtype, tmp_path)
    tensors = (x, weight.data, weight.scale, norm, bias, residual, out, partial, counters)
    shift, part = linear_w4.group_shift(k, weight.groups), -(-units // sizes.parts)
    numbers = (rows, outputs, k, weight.groups, shift, part, int(gate == "gelu_tanh"), ctypes.c_float(EPS))
    library.run(tiles, sizes.parts, sizes.shared_bytes, *map(pointer, tensors), *numbers)
    wanted = expected(x, exact, norm, bias, gate, residual)
    assert not counters.any()
    assert float((out.float() - wanted).norm() / wanted.norm()) < (0.004 if out_dtype == torch.bfloat16 else 1e-5)


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
    weight.data, weight.scale = weight.data.cuda(), weight.scale.cuda()
    norm, bias, residual = (None if tensor is None else tensor.cuda() for tensor in (norm, bias, residual))
    for early in (False, True):
        out = linear_w4.few_rows(x.cuda(), weight, bias, torch.float32, norm, EPS, gate, residual, early)
        assert float((out.cpu() - wanted).norm() / wanted.norm()) < 1e-4


def test_sizes_fill_the_gpu_with_equal_parts() -> None:
    """The products of an 8B model on 132 multiprocessors: fused q, k and v; output; gate and up; down."""
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    assert [linear_w4.sizes_for(8, n, k, 132).parts for n, k in shapes] == [4, 8, 1, 8]
    assert [linear_w4.sizes_for(rows, 4096, 4096, 132).nt for rows in (2, 8, 9, 16)] == [1, 1, 2, 2]
