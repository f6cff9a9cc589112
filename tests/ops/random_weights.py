"""Random quantized weights for the tests of products."""

from __future__ import annotations

import torch

from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme


def quantized(n: int, k: int, kind: str, group: int | None, generator: torch.Generator) -> QuantizedWeight:
    """A random weight: 4 or 8 bits, then s (symmetric), z (zero points), m (free offsets) or a (int8 inputs)."""
    bits = int(kind[0])
    columns = k // 2 if bits == 4 else k
    codes = torch.randint(0, 256, (n, columns), generator=generator, dtype=torch.uint8)
    codes = codes if bits == 4 else codes.view(torch.int8)
    shape = (n, k // (group or k))
    scale = torch.rand(shape, generator=generator) * 0.01 + 0.001
    scale = scale.to(torch.float16 if kind[1] == "m" else torch.bfloat16)
    offset = None
    if kind == "4s":
        offset = -8 * scale
    elif kind[1] == "z":
        offset = -torch.randint(0, 16, shape, generator=generator).to(scale.dtype) * scale
    elif kind[1] == "m":
        offset = (torch.randn(shape, generator=generator) * 0.05).to(scale.dtype)
    activations = ActivationScheme() if kind[1] == "a" else None
    strategy = "group" if group else "channel"
    scheme = WeightScheme(bits, "int", offset is None or kind == "4s", strategy, group, activations)
    return QuantizedWeight(scheme, (n, k), codes, scale, offset)
