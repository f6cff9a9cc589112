"""Rotary position embedding (Su et al., 2021): frequencies, their scalings, and the table that kernels read.

Scalings that keep one set of frequencies for all positions are served: `default`, `linear` (position interpolation),
`llama3` (Llama 3.1's by-wavelength interpolation) and `yarn` (Peng et al., 2023). `dynamic` (NTK by length) equals
`default` up to `max_position_embeddings`, which is as far as it is served: past that the frequencies would change under
keys that are already in the cache. `longrope` (Ding et al., 2024) has frequencies for short and for long contexts, and
for the same reason the longest sequence that will be served chooses between them. `none` turns nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError

_STRETCHED = ("llama3", "yarn", "longrope")  # those that know the length before they were scaled
SERVED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "none")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary settings of a model.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: leading elements of a head that are rotated.
        max_position: positions that the model may see.
        rope_type: one of `SERVED_ROPE_TYPES`.
        scaling: the other values of `rope_parameters`, by Hugging Face's names.
    """

    theta: float
    rotary_dim: int
    max_position: int
    rope_type: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: dict[str, Any], head_dim: int, max_position: int) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before) from config.json."""
        given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope_type = given.pop("rope_type", None) or given.pop("type", None) or "default"
        given.pop("type", None)
        theta = given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if rope_type in (*_STRETCHED, "su"):
            original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
            given["original_max_position_embeddings"] = original or max_position
        return cls(float(theta), int(head_dim * partial), max_position, rope_type, given)

    def unsupported_reason(self) -> str | None:
        """Why these frequencies cannot be computed here, or None."""
        if self.rope_type not in SERVED_ROPE_TYPES:
            return f"rope_type {self.rope_type!r} is not one of {', '.join(SERVED_ROPE_TYPES)}"
        needed = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
            "longrope": ("short_factor", "long_factor"),
        }
        missing = [key for key in needed.get(self.rope_type, ()) if key not in self.scaling]
        if missing:
            return f"rope_type {self.rope_type!r} without {', '.join(missing)} in rope_parameters"
        if self.rope_type == "longrope":
            return self._longrope_reason()
        return None

    def _longrope_reason(self) -> str | None:
        for key in ("short_factor", "long_factor"):
            if len(self.scaling[key]) != self.rotary_dim // 2:
                return f"{key} has {len(self.scaling[key])} numbers, but {self.rotary_dim} rotary elements are in pairs"
        return None


def inverse_frequencies(rope: RopeConfig, length: int) -> tuple[Tensor, float]:
    """Frequencies [rotary_dim / 2] (float32, radians a position) and the factor that multiplies cos and sin.

    `length` is that of the longest sequence to be served.
    """
    reason = rope.unsupported_reason()
    if reason:
        raise UnsupportedModelError(reason)
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / (rope.theta**exponent)
    if rope.rope_type == "linear":
        return frequencies / rope.scaling["factor"], 1.0
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope.scaling), 1.0
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope)
    if rope.rope_type == "longrope":
        return _longrope(frequencies, rope, length)
    if rope.rope_type == "none":
        return torch.zeros_like(frequencies), 1.0
    return frequencies, 1.0


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended by how many turns they make."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / factor + keep * frequencies


def _longrope(frequencies: Tensor, rope: RopeConfig, length: int) -> tuple[Tensor, float]:
    """LongRoPE: a divisor for each frequency, and a temperature by how far the context was stretched."""
    scaling, original = rope.scaling, rope.scaling["original_max_position_embeddings"]
    divisors = torch.tensor(scaling["long_factor" if length > original else "short_factor"], dtype=torch.float32)
    stretch = scaling.get("factor") or rope.max_position / original
    temperature = scaling.get("attention_factor")
    if temperature is None:
        temperature = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return frequencies / divisors, float(temperature)


def _yarn(frequencies: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """YaRN, equations 17 to 23: a ramp over dimensions between interpolation and extrapolation, and a temperature."""
    scaling, original = rope.scaling, rope.scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or rope.max_position / original

    def dimension(turns: float) -> float:
        return rope.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp), _yarn_temperature(scaling, factor)


def _yarn_temperature(scaling: dict[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def cos_sin_table(rope: RopeConfig, length: int, device: torch.device | str = "cpu") -> Tensor:
    """Table [length, rotary_dim], float32: the cosines of a position, then its sines."""
    frequencies, factor = inverse_frequencies(rope, length)
    angles = torch.arange(length, dtype=torch.float32).unsqueeze(1) * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * factor).to(device)
