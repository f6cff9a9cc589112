"""Numbers of bytes for people."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """Decimal units, as memory is sold: 327.7 kB, 41.9 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def binary_size(num_bytes: float) -> str:
    """Powers of 1,024, as memory is addressed: 320.0 KiB, 39.1 GiB."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes:.0f} B"
