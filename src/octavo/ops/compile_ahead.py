"""Kernels compiled before they are needed, on devices whose kernels are compiled at run time."""

from __future__ import annotations

from collections.abc import Callable

from octavo.ops.triton import runtime

_triton = runtime.lazy("ahead", "compile_ahead")


def compile_ahead(launch: Callable[[], object]) -> int:
    """Call `launch`, in which kernels are compiled, many at a time, in place of being run; returns how many were.

    What the kernels would have written is undefined then, so `launch` must not look at it, nor use it as an index.
    Where kernels are not compiled at run time, nothing is called.
    """
    return 0 if runtime.unavailable() is not None else int(_triton(launch))
