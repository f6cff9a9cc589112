"""Kernels compiled before they are needed, on devices whose kernels are compiled at run time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from octavo.ops.triton import runtime

_triton = runtime.lazy("ahead", "compile_ahead")
_hash_compiler = runtime.lazy("ahead", "hash_compiler")
_build_plans = runtime.lazy("attention_cudnn", "build_plans")
_flash_fits = runtime.lazy("attention_flash", "fits")
_prepare_flash = runtime.lazy("attention_flash", "prepare")


def begin_ahead(device: torch.device) -> None:
    """Begin with what `compile_ahead` needs and no model, in a thread: call it before weights are read."""
    if device.type == "cuda" and runtime.unavailable() is None:
        threading.Thread(target=_hash_compiler, name="hash-compiler", daemon=True).start()


def import_attention(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Import the library that `paged_attention` takes for long prompts with such heads; False where there is none.

    It takes about a second, all of it Python's own work, which threads would not shorten.
    """
    return device.type == "cuda" and runtime.unavailable() is None and bool(_flash_fits(dtype, head_dim))


def compile_ahead(launch: Callable[[], object]) -> int:
    """Call `launch`, in which kernels are compiled, many at a time, in place of being run; returns how many were.

    What the kernels would have written is undefined then, so `launch` must not look at it, nor use it as an index.
    Where kernels are not compiled at run time, nothing is called.
    """
    return 0 if runtime.unavailable() is not None else int(_triton(launch))


def plan_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    max_context: int,
    max_requests: int,
) -> int:
    """Prepare what `paged_attention` of long prompts takes from a library; returns how many plans or kernels it made.

    For steps of up to `max_rows` rows and `max_requests` requests, and contexts of up to `max_context` tokens. Some
    libraries keep plans by thread, so the thread that runs steps must call it.
    """
    if device.type != "cuda" or runtime.unavailable() is not None:
        return 0
    shape = (num_heads, num_kv_heads, head_dim)
    if _flash_fits(dtype, head_dim):
        _prepare_flash(*shape, dtype, device)
        return 1
    return int(_build_plans(*shape, dtype, device, max_rows, max_context, max_requests))
