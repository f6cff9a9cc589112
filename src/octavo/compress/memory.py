"""How the C library hands out the large buffers of a block's forward pass."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt
_MOST, _USUAL_LARGEST = 1 << 30, 32 << 20


_threshold = _USUAL_LARGEST  # size from which a buffer is a mapping of its own, as last asked for


@contextmanager
def reused_buffers(largest: int) -> Iterator[None]:
    """Keep freed buffers of up to twice `largest` bytes, at most 1 GiB, for reuse while this lasts.

    glibc otherwise asks the system for each buffer above 32 MiB and gives it back when it is freed; clearing the new
    pages then takes a quarter of the forward pass of a calibration batch. A layer frees a few such buffers together,
    so eight times `largest`, at most 1 GiB, may lie free at the end of the heap. At the end, what is free is given
    back. Nothing happens with another C library.
    """
    with _mapped_from(min(max(2 * largest, _USUAL_LARGEST), _MOST)):
        yield


@contextmanager
def returned_buffers() -> Iterator[None]:
    """Inside `reused_buffers`: give back what was kept, and keep nothing while this lasts.

    For work on a few huge buffers of many sizes, which would leave each other holes: the solver on an 8B model's
    layers took a gigabyte more than it held.
    """
    with _mapped_from(_USUAL_LARGEST):
        yield


@contextmanager
def _mapped_from(size: int) -> Iterator[None]:
    """Buffers of at least `size` bytes are mappings of their own, given back when freed; smaller ones are kept."""
    global _threshold
    library, before = _glibc(), _threshold
    if library is None:
        yield
        return
    _set_threshold(library, size)
    try:
        yield
    finally:
        _set_threshold(library, before)


def _set_threshold(library: ctypes.CDLL, size: int) -> None:
    global _threshold
    _threshold = size
    library.mallopt(_MMAP_THRESHOLD, size)
    kept = min(4 * size, _MOST) if size > _USUAL_LARGEST else 2 * _USUAL_LARGEST
    library.mallopt(_TRIM_THRESHOLD, kept)
    library.malloc_trim(0)


def free_unused() -> None:
    """Give the pages of freed buffers back to the system, those between buffers that are in use too."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    known = library is not None and hasattr(library, "mallopt") and hasattr(library, "malloc_trim")
    return library if known else None
