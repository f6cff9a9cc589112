"""How the C library hands out the large buffers of a block's forward pass."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt
_MOST, _USUAL_LARGEST = 1 << 30, 32 << 20


@contextmanager
def reused_buffers(largest: int) -> Iterator[None]:
    """Keep freed buffers of up to twice `largest` bytes, at most 1 GiB, for reuse while this lasts.

    glibc otherwise asks the system for each buffer above 32 MiB and gives it back when it is freed; clearing the new
    pages then takes a quarter of the forward pass of a calibration batch. At the end, what is free is given back.
    Nothing happens with another C library.
    """
    library = _glibc()
    if library is None:
        yield
        return
    size = min(max(2 * largest, _USUAL_LARGEST), _MOST)
    library.mallopt(_MMAP_THRESHOLD, size)
    library.mallopt(_TRIM_THRESHOLD, size)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _USUAL_LARGEST)
        library.mallopt(_TRIM_THRESHOLD, 2 * _USUAL_LARGEST)
        library.malloc_trim(0)


def free_unused() -> None:
    """Give the pages of freed buffers back to the system, those between buffers that are in use too.

    For moments after which larger or other buffers are needed: forward passes leave what the solver cannot use.
    """
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    known = library is not None and hasattr(library, "mallopt") and hasattr(library, "malloc_trim")
    return library if known else None
