"""CUDA C++ at run time: NVRTC, which torch brings along, compiles a kernel, the driver loads and launches it.

No nvcc, no headers and no build step: a kernel is a file of this folder, its sizes are macros, and what was compiled is
kept in Octavo's cache folder under a hash of both.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.folders import cache_folder

_SUCCESS = 0
_INCLUDE = re.compile(rb'^#include "(\w+\.cuh)"$', re.MULTILINE)
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent
_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_FREE_SHARED = 16 << 10  # bytes that a block may have without asking, with what the kernel declares itself


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Kernel:
    """A loaded kernel; `launch` takes what its signature has: tensors or None, ints, floats, structures as bytes."""

    def __init__(self, function: ctypes.c_void_p, threads: int, shared_bytes: int) -> None:
        self._function, self._threads, self._shared = function, threads, shared_bytes

    def launch(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], device: torch.device, early: bool) -> None:
        """`early`: the kernel may begin while the one ahead still runs (it waits itself for what that writes)."""
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        overlap = _Attribute(id=_OVERLAP)
        overlap.value[0] = 1
        stream = torch.cuda.current_stream(device).cuda_stream
        config = _Config(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(self._threads, 1, 1), self._shared, stream,
            ctypes.pointer(overlap), int(early),
        )  # fmt: skip
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None), "cuLaunchKernelEx")


def _value(argument: Any) -> Any:
    if isinstance(argument, bytes):
        return (ctypes.c_char * len(argument)).from_buffer_copy(argument)
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


_WORDS = 2  # CU_TENSOR_MAP_DATA_TYPE_UINT32
_PROMOTION = 0  # CU_TENSOR_MAP_L2_PROMOTION_NONE: that to 256 bytes costs attention 5 %, products of few rows 1 %


_SWIZZLE = 3  # CU_TENSOR_MAP_SWIZZLE_128B


@functools.lru_cache(4096)
def tensor_map(address: int, rows: int, row_bytes: int, box_bytes: int, box_rows: int) -> bytes:
    """The CUtensorMap by which a kernel copies boxes, `box_rows` by `box_bytes`, of rows that follow each other."""
    return _described(address, (row_bytes // 4, rows), (row_bytes,), (box_bytes // 4, box_rows), 0)


@functools.lru_cache(4096)
def column_map(address: int, rows: int, row_bytes: int, box_rows: int) -> bytes:
    """The same for boxes of whole rows that arrive column by column of 128 bytes, so that 8 rows lie in all banks."""
    columns = row_bytes // 128
    return _described(address, (32, rows, columns), (row_bytes, 128), (32, box_rows, columns), _SWIZZLE)


def _described(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> bytes:
    """Sizes and boxes in 32-bit words, the innermost first; strides in bytes, of all but the innermost."""
    described, rank = (ctypes.c_uint64 * 16)(), len(sizes)
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.byref(described), _WORDS, rank, ctypes.c_void_p(address), (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*([1] * rank)), 0, swizzle, _PROMOTION, 0,
        ),
        "cuTensorMapEncodeTiled",
    )  # fmt: skip
    return bytes(described)


@functools.cache
def unavailable() -> str | None:
    """Why kernels of this folder cannot run in this process, or None."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "torch finds no usable NVIDIA GPU"
    if torch.cuda.get_device_capability() < (9, 0):
        return "needs compute capability 9.0 or later"
    try:
        _nvrtc()
        _driver()
    except OSError as error:
        return f"NVRTC is not there ({error})"
    return None


def load(name: str, macros: Mapping[str, int], threads: int, shared_bytes: int) -> Kernel:
    """The kernel `name` of `<name>.cu`, compiled with these macros for the current device, from the cache if it can."""
    major, minor = torch.cuda.get_device_capability()
    binary = _cached(name, macros, f"sm_{major}{minor}a")
    torch.cuda.current_stream().synchronize()  # torch's context is the current one from here on
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), binary), "cuModuleLoadData")
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
    # A block of the next kernel can join this one's on a multiprocessor only if its memory is not lent to the L1 cache.
    _check(_driver().cuFuncSetAttribute(function, _CARVEOUT, 100), "cuFuncSetAttribute")
    if shared_bytes > _FREE_SHARED:
        _check(_driver().cuFuncSetAttribute(function, _DYNAMIC_SHARED, shared_bytes), "cuFuncSetAttribute")
    return Kernel(function, threads, shared_bytes)


def _cached(name: str, macros: Mapping[str, int], target: str) -> bytes:
    source = read_source(Path(__file__).parent / f"{name}.cu")
    options = [f"--gpu-architecture={target}", "--std=c++17", *(f"-D{key}={value}" for key, value in macros.items())]
    version = f"{_nvrtc_version()}"
    key = hashlib.sha256(b"\0".join((source, version.encode(), *(option.encode() for option in options)))).hexdigest()
    path = cache_folder() / "kernels" / f"{name}-{key[:32]}.cubin"
    if path.is_file():
        return path.read_bytes()
    binary = compile_source(source, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(binary)
    os.replace(part, path)
    return binary


def read_source(path: Path) -> bytes:
    """A kernel's program, with the files of its folder that it includes."""
    return _INCLUDE.sub(lambda line: (path.parent / line[1].decode()).read_bytes(), path.read_bytes())


def compile_source(source: bytes, options: list[str]) -> bytes:
    """The machine code of a program; RuntimeError with the compiler's log."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None))
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments) != _SUCCESS:
            raise RuntimeError(f"NVRTC: {_text(program, 'ProgramLog')}")
        return _bytes(program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check_nvrtc(getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check_nvrtc(getattr(_nvrtc(), f"nvrtcGet{what}")(program, content))
    return content.raw


def _text(program: ctypes.c_void_p, what: str) -> str:
    return _bytes(program, what).rstrip(b"\0").decode(errors="replace")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The library that torch's wheel depends on, or the system's; OSError where there is none."""
    major = (torch.version.cuda or "13").split(".")[0]
    for path in _library_files(f"libnvrtc.so.{major}*"):
        return ctypes.CDLL(str(path))
    return ctypes.CDLL(f"libnvrtc.so.{major}")


def _library_files(pattern: str) -> Iterator[Path]:
    for folder in dict.fromkeys([*site.getsitepackages(), *sys.path]):
        yield from sorted(Path(folder).glob(f"nvidia/*/lib/{pattern}"))


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check_nvrtc(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _check_nvrtc(code: int) -> None:
    if code != _SUCCESS:
        raise RuntimeError(f"NVRTC returned {code}")


def _check(code: int, call: str) -> None:
    if code != _SUCCESS:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"{call} returned {code} ({(name.value or b'').decode()})")
