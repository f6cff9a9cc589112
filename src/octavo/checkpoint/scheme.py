"""How a weight is quantized, in the words of compressed-tensors. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import UnsupportedModelError

WEIGHT_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
ACTIVATION_STRATEGIES = ("token", "tensor", "group", "tensor_group")
TYPES = ("int", "float")


def _require(ok: bool, what: str, value: object, allowed: object) -> None:
    if not ok:
        raise UnsupportedModelError(f"quantization scheme: {what} is {value!r}; it must be {allowed}")


@dataclass(frozen=True)
class ActivationScheme:
    """How the inputs of a linear layer are quantized at run time (W8A8: int8, one scale a token)."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str = "token"
    dynamic: bool = True
    group_size: int | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.num_bits <= 16, "activations.num_bits", self.num_bits, "within 1..16")
        _require(self.type in TYPES, "activations.type", self.type, f"one of {TYPES}")
        _require(
            self.strategy in ACTIVATION_STRATEGIES,
            "activations.strategy",
            self.strategy,
            f"one of {ACTIVATION_STRATEGIES}",
        )


@dataclass(frozen=True)
class WeightScheme:
    """How a weight [N, K] is quantized; `group_size` counts input elements and is set for groups alone.

    The strategy "tensor_group" (NVFP4) has a scale a group and one over all of them; "block" has one for each
    `block_structure` of rows and columns.
    """

    num_bits: int
    type: str = "int"
    symmetric: bool = True
    strategy: str = "group"
    group_size: int | None = None
    activations: ActivationScheme | None = None
    block_structure: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.num_bits <= 8, "num_bits", self.num_bits, "within 1..8")
        _require(self.type in TYPES, "type", self.type, f"one of {TYPES}")
        _require(self.strategy in WEIGHT_STRATEGIES, "strategy", self.strategy, f"one of {WEIGHT_STRATEGIES}")
        if self.strategy in ("group", "tensor_group"):
            _require(
                self.group_size is not None and self.group_size > 0,
                "group_size",
                self.group_size,
                "a positive number for scales by group",
            )
        else:
            _require(self.group_size is None, "group_size", self.group_size, f"None for the strategy {self.strategy!r}")

    @property
    def power_of_two(self) -> bool:
        """Whether scales are powers of two, stored as their exponents (MXFP4)."""
        return self.type == "float" and self.num_bits == 4 and self.strategy == "group"

    def num_groups(self, in_features: int) -> int:
        """Scales a row of `in_features` elements has. A size that the group does not divide is an error."""
        if self.group_size is None:
            return 1
        _require(
            in_features % self.group_size == 0, "group_size", self.group_size, f"a divisor of the {in_features} inputs"
        )
        return in_features // self.group_size
