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
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
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
