"""Memory of the weights at each width, and how many accelerators hold them.

Two answers at each width. The plain one is parameters x bits / 8. The other is what a weight-only checkpoint really
holds: only the linear layers are quantized (with a 16-bit scale a group), embeddings and LM head stay at 16 bits.
For a small model with a large vocabulary that is far from the 75 % that "16 to 4 bits" suggests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.errors import UserError
from octavo.plan.shape import Parameters

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMbBtT])?")
_FACTOR = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
SCALE_BYTES = 2


@dataclass(frozen=True)
class WeightRow:
    """One width. `checkpoint_*` is None where only a parameter count is known, or nothing is quantized."""

    bits: int
    weight_bytes: int
    reduction: float  # against 16 bits
    devices: int  # that hold the weights alone
    free_bytes: int  # on those devices beside the weights
    checkpoint_bytes: int | None
    checkpoint_reduction: float | None
    checkpoint_devices: int | None


@dataclass(frozen=True)
class MemoryPlan:
    """What a model's weights need."""

    params: int
    active_params: int | None
    linear_share: float | None  # of the parameters that quantization covers
    is_tied: bool | None
    device_memory_bytes: int
    group_size: int
    rows: tuple[WeightRow, ...]
    duplicate_head_bytes: int | None  # of a tied LM head that a file may hold a second time

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_count(text: str) -> int:
    """`109B`, `596M`, `1.1T` or plain digits as a number of parameters."""
    match = _COUNT.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise UserError(f"{text!r} is no parameter count; write for example 109B, 596M or 7000000000", param="params")
    return round(float(match[1]) * _FACTOR.get((match[2] or "").lower(), 1))


def weight_bytes(params: int, bits: int) -> int:
    """Bytes of `params` numbers of `bits` bits."""
    return math.ceil(params * bits / 8)


def checkpoint_bytes(p: Parameters, bits: int, group_size: int) -> int:
    """Bytes of a checkpoint whose linear layers have `bits` bits; 16 bits leave everything as it is."""
    if bits >= 16:
        return weight_bytes(p.total, bits)
    scales = math.ceil(p.linear / group_size) * SCALE_BYTES
    return weight_bytes(p.linear, bits) + scales + 2 * (p.total - p.linear)


def plan_memory(
    parameters: Parameters | int,
    bits: Sequence[int] = (16, 8, 4),
    device_memory_bytes: int = 80 * 10**9,
    group_size: int = 128,
) -> MemoryPlan:
    """The table of `octavo plan memory`, from parameters by part or from their number alone."""
    for name, value, low in (("--gpu-memory", device_memory_bytes, 1), ("--group-size", group_size, 1)):
        if value < low:
            raise UserError(f"{name} is {value}; it must be positive", param=name.strip("-").replace("-", "_"))
    wrong = [b for b in bits if not 1 <= b <= 32]
    if wrong:
        raise UserError(f"--bits {wrong[0]} is outside 1..32", param="bits")
    parts = parameters if isinstance(parameters, Parameters) else None
    total = parameters if isinstance(parameters, int) else parameters.total
    return MemoryPlan(
        params=total,
        active_params=parts.active if parts and parts.router else None,
        linear_share=parts.linear / parts.total if parts else None,
        is_tied=parts.lm_head == 0 if parts else None,
        device_memory_bytes=device_memory_bytes,
        group_size=group_size,
        rows=tuple(_row(total, parts, b, device_memory_bytes, group_size) for b in bits),
        duplicate_head_bytes=2 * parts.embedding if parts and parts.lm_head == 0 else None,
    )


def _row(total: int, parts: Parameters | None, bits: int, device: int, group_size: int) -> WeightRow:
    plain, full = weight_bytes(total, bits), weight_bytes(total, 16)
    devices = math.ceil(plain / device)
    real = checkpoint_bytes(parts, bits, group_size) if parts and bits < 16 else None
    return WeightRow(
        bits=bits,
        weight_bytes=plain,
        reduction=1 - plain / full,
        devices=devices,
        free_bytes=devices * device - plain,
        checkpoint_bytes=real,
        checkpoint_reduction=1 - real / full if real is not None else None,
        checkpoint_devices=math.ceil(real / device) if real is not None else None,
    )
