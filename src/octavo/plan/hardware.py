"""Accelerators: memory, bandwidth and arithmetic, as their makers' data sheets give them.

Memory is in GB of 10^9 bytes as the product is named (a card has a little more, the driver keeps a little back);
bandwidth in GB/s; arithmetic in dense TFLOP/s (TOP/s for int8), without the factor of two for structured sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import UserError


@dataclass(frozen=True)
class Accelerator:
    """One device."""

    name: str
    memory_gb: float
    bandwidth_gbs: float
    bf16_tflops: float
    fp8_tflops: float | None  # None: no FP8 units
    int8_tops: float | None

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * 1e9)


ACCELERATORS: dict[str, Accelerator] = {
    a.name: a
    for a in (
        Accelerator("a100-40", 40, 1555, 312, None, 624),
        Accelerator("a100-80", 80, 2039, 312, None, 624),
        Accelerator("h100-80", 80, 3350, 989, 1979, 1979),
        Accelerator("h100-pcie-80", 80, 2000, 756, 1513, 1513),
        Accelerator("h200-141", 141, 4800, 989, 1979, 1979),
        Accelerator("b200-180", 180, 7700, 2250, 4500, 4500),
        Accelerator("l4-24", 24, 300, 121, 242, 242),
        Accelerator("l40s-48", 48, 864, 362, 733, 733),
        Accelerator("a10-24", 24, 600, 125, None, 250),
        Accelerator("rtx4090-24", 24, 1008, 165, 330, 661),
        Accelerator("mi300x-192", 192, 5300, 1307, 2615, 2615),
        Accelerator("mi325x-256", 256, 6000, 1307, 2615, 2615),
    )
}


def find_accelerator(name: str) -> Accelerator:
    """By its name, or by the part before the size where that is unambiguous (`h200`)."""
    key = name.lower().replace("_", "-").replace(" ", "-").removesuffix("gb")
    matches = [a for a in ACCELERATORS.values() if a.name == key or a.name.rsplit("-", 1)[0] == key]
    if len(matches) != 1:
        raise UserError(
            f"accelerator {name!r} is not known; choose one of {', '.join(ACCELERATORS)}", param="accelerator"
        )
    return matches[0]
