"""What `config.json` says about the attention of each layer: full, or within a sliding window."""

from __future__ import annotations

from typing import Any

from octavo.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_kinds(config: dict[str, Any], num_layers: int, default: list[str]) -> list[str]:
    """`layer_types` of the file, else `default`; CheckpointError where the file names too few or too many."""
    given = config.get("layer_types")
    if given is None:
        return default
    if len(given) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(given)} entries, but num_hidden_layers is {num_layers}; "
            "give one entry a layer"
        )
    return list(given)


def every_nth_full(num_layers: int, period: int) -> list[str]:
    """Sliding windows, with full attention in each `period`-th layer."""
    return [SLIDING if (index + 1) % period else FULL for index in range(num_layers)]
