"""Opens the compiled kernels, if they were built and this CPU can run them.

There is one library for AVX2 and one for AVX-512, built from the same sources; the best that the CPU runs is opened.
Each is plain C to the outside (pointers and integers), so one build serves every Python and torch. It must be
opened after torch: both name their OpenMP runtime libgomp.so.1, the loader then gives the kernels torch's copy, and
there is one pool of threads, sized by `torch.set_num_threads`.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

ABI_VERSION = 7
MAX_HEAD_DIM = 512  # as in common.h
LIBRARIES = ("_kernels_avx512.so", "_kernels_avx2.so")  # best first
DISABLE_VARIABLE = "OCTAVO_DISABLE_CPU_KERNELS"

_SIGNATURES: dict[str, list[type]] = {
    "octavo_linear": [c_void_p, c_void_p, c_int64, c_void_p, c_int32, c_void_p],
    "octavo_rows": [c_void_p, c_void_p, c_int64, c_void_p, c_int32],
    "octavo_rms_norm": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float],
    "octavo_add_rms_norm": [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float],
    "octavo_silu_mul": [c_void_p, c_void_p, c_int64, c_int64],
    "octavo_gelu_tanh_mul": [c_void_p, c_void_p, c_int64, c_int64],
    "octavo_rotary_and_store": [*[c_void_p] * 6, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_float, c_int32],
    "octavo_decoder_layer": [*[c_void_p] * 5, c_int32],
    "octavo_read": [c_void_p, c_int64],
    "octavo_add_product": [*[c_void_p] * 4, c_int64, c_int64, c_int64, c_int32],
    "octavo_fit_scales": [*[c_void_p] * 3, c_int64, c_int64, c_float, c_float, c_void_p, c_int64],
    "octavo_pick_scales": [*[c_void_p] * 5, c_int64, c_int64, c_int64, c_float, c_float],
    "octavo_round_columns": [c_void_p, c_int64, c_int64, c_float, c_float],
    "octavo_rounding_difference": [
        *[c_void_p] * 4,
        c_int64,
        c_int64,
        c_int64,
        c_float,
        c_float,
        c_float,
        c_void_p,
        c_int64,
    ],
    "octavo_store_kv": [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64],
    "octavo_paged_attention": [
        *[c_void_p] * 6,
        c_int64,
        c_int64,
        c_int64,
        c_float,
        c_int64,
        c_float,
        c_void_p,
        c_int64,
    ],
}


@cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """(library, None), or (None, why there is none)."""
    if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
        return None, f"switched off by {DISABLE_VARIABLE}"
    files = [path for name in LIBRARIES if (path := Path(__file__).parent / name).exists()]
    if not files:
        return None, "not built: no compiler when the package was installed (reinstall with g++ and OpenMP at hand)"
    reason = None
    for path in files:
        library, reason = _open(path)
        if library is not None:
            return library, None
    return None, reason


def _open(path: Path) -> tuple[ctypes.CDLL | None, str | None]:
    """One of the libraries, if this CPU runs it, or why not. Opening it runs none of its code."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"cannot be opened: {error}"
    version = library.octavo_abi_version()
    if version != ABI_VERSION:
        return None, f"an old build (interface {version}, not {ABI_VERSION}): reinstall the package"
    if min(library.octavo_cpu_level(), _allowed_level()) < library.octavo_needed_level():
        return None, "this CPU lacks AVX2 with FMA and F16C, or ONEDNN_MAX_CPU_ISA rules them out"
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int64 if name == "octavo_read" else None
    return library, None


def _allowed_level() -> int:
    """The most that ONEDNN_MAX_CPU_ISA allows: it limits torch's products, and these, so that both stay comparable."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in ("SSE41", "AVX"):
        return 0
    if limit.startswith("AVX2"):
        return 1
    return 2 if limit.startswith(("AVX512", "AVX10_1")) and "AMX" not in limit else 3


@cache
def level() -> int:
    """0: no kernels; 1: AVX2 with FMA and F16C; 2: AVX-512 with BF16 and VNNI; 3: AMX too."""
    library = load()[0]
    return 0 if library is None else min(library.octavo_cpu_level(), _allowed_level())


def unavailable() -> str | None:
    """Why the kernels cannot be used in this process, or None."""
    return load()[1]


def read(buffer: Tensor) -> int:
    """Read a CPU tensor once with all threads, as the products read weights; for the limits of the benchmarks."""
    library = load()[0]
    assert library is not None
    return int(library.octavo_read(buffer.data_ptr(), buffer.nbytes))


@cache
def torch_has_bfloat16_products() -> bool:
    """Whether torch's own products use the bfloat16 instructions of this CPU (Linux says which it has)."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return "avx512_bf16" in flags and torch.backends.cpu.get_cpu_capability() == "AVX512"


def prefers_interleaved(device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int) -> bool:
    """Whether the attention kernel that will run reads the interleaved order of `KVCache`."""
    suits = device.type == "cpu" and dtype == torch.bfloat16 and block_size % 16 == 0 and head_dim % 16 == 0
    return suits and head_dim <= MAX_HEAD_DIM and unavailable() is None
