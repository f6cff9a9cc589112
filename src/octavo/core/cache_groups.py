"""Layers come in cache groups by kind: what a layer must keep of the past decides when its blocks may go.

Every group has its own block table a request over one pool of blocks. A block belongs to one group at a time, so the
j-th layers of all groups can share one tensor (`cache_layout`), provided that the groups hold about as many layers each
(`group_layers` splits the kinds accordingly). The scheme follows vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.errors import UserError

MAX_GROUPS = 8


@dataclass(frozen=True)
class KVCacheSpec:
    """What one layer stores of a token: `2 * num_kv_heads * head_dim` elements (keys and values).

    With `shares_values` it is half of that: the values are columns of the keys (latent attention).

    `kind` names an entry of `CACHE_KINDS`. `window` counts the positions that a query sees, itself included, and is
    given for kind "sliding" only. `bytes_per_element` may be a fraction (packed caches).
    """

    kind: str
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    bytes_per_element: float = 2
    shares_values: bool = False

    def __post_init__(self) -> None:
        if self.kind not in CACHE_KINDS:
            raise UserError(f"the cache kind {self.kind!r} is unknown; it must be one of {sorted(CACHE_KINDS)}")
        if (self.kind == "sliding") != (self.window is not None):
            raise UserError(f"a window is given for kind 'sliding' only: kind {self.kind!r}, window {self.window}")
        if self.window is not None and self.window < 1:
            raise UserError(f"the attention window is {self.window}; it must be at least 1")

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer of this kind."""
        tensors = 1 if self.shares_values else 2
        return round(tensors * self.num_kv_heads * self.head_dim * self.bytes_per_element)

    @property
    def behaviour(self) -> CacheKind:
        """The rules of this layer's kind."""
        return CACHE_KINDS[self.kind]


class CacheKind(Protocol):
    """The rules of one kind of layer, in positions and blocks."""

    reserves_prompt: bool
    """Whether admission takes blocks for the whole prompt (else they are taken chunk by chunk)."""

    def first_needed(self, spec: KVCacheSpec, position: int) -> int:
        """The lowest position that a query at `position` or later reads; blocks wholly below it may be freed."""

    def longest_hit(self, spec: KVCacheSpec, is_cached: Callable[[int], bool], limit: int, block_size: int) -> int:
        """The most leading blocks, up to `limit`, such that a query right after them finds all it reads."""

    def max_blocks(self, spec: KVCacheSpec, length: int, in_flight: int, block_size: int) -> int:
        """Blocks that a sequence of `length` tokens ever holds at once, with up to `in_flight` tokens in flight."""


class FullAttention:
    """Every position is read for ever."""

    reserves_prompt = True

    def first_needed(self, spec: KVCacheSpec, position: int) -> int:
        return 0

    def longest_hit(self, spec: KVCacheSpec, is_cached: Callable[[int], bool], limit: int, block_size: int) -> int:
        for index in range(limit):
            if not is_cached(index):
                return index
        return limit

    def max_blocks(self, spec: KVCacheSpec, length: int, in_flight: int, block_size: int) -> int:
        return -(-length // block_size)


class SlidingWindow:
    """A query at p reads p - window + 1 .. p, so older blocks are freed and a hit needs the last window only."""

    reserves_prompt = False

    def first_needed(self, spec: KVCacheSpec, position: int) -> int:
        assert spec.window is not None
        return max(0, position - spec.window + 1)

    def longest_hit(self, spec: KVCacheSpec, is_cached: Callable[[int], bool], limit: int, block_size: int) -> int:
        end, index = limit, limit - 1  # blocks index + 1 .. end - 1 are cached
        while end > 0:
            first = self.first_needed(spec, end * block_size) // block_size
            while index >= first and is_cached(index):
                index -= 1
            if index < first:
                return end
            end = index  # the block `index` is missing, so a hit ends before it
            index -= 1
        return 0

    def max_blocks(self, spec: KVCacheSpec, length: int, in_flight: int, block_size: int) -> int:
        assert spec.window is not None
        span = spec.window - 1 + in_flight
        return min(-(-length // block_size), -(-span // block_size) + 1)


CACHE_KINDS: dict[str, CacheKind] = {"full": FullAttention(), "sliding": SlidingWindow()}
"""Kinds by name; a further kind (latent, recurrent) is one more entry."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table, because they keep the same part of the past."""

    spec: KVCacheSpec
    layers: list[int]


@dataclass(frozen=True)
class CacheLayout:
    """Which tensor each layer uses: `slots` are the tensors to allocate, `slot_of_layer[i]` is layer i's."""

    slots: list[KVCacheSpec] = field(default_factory=list)
    slot_of_layer: list[int] = field(default_factory=list)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all tensors, from which the number of blocks follows."""
        return block_size * sum(slot.bytes_per_token for slot in self.slots)


def group_layers(specs: Sequence[KVCacheSpec]) -> list[CacheGroup]:
    """Group layers by equal specification, split so that groups are of about equal size (at most about MAX_GROUPS).

    A model of one kind gives one group. A model with 4 full and 22 sliding layers gives one group of 4 full layers and
    six of at most 4 sliding ones: a block then holds 4 layers, whichever kind owns it, and no memory is idle.
    """
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    if not by_spec:
        raise UserError("the model has no layer that keeps a KV cache; Octavo serves causal attention models only")
    size = min(len(layers) for layers in by_spec.values())
    size = max(size, -(-len(specs) // MAX_GROUPS))
    groups = []
    for spec, layers in by_spec.items():
        groups += [CacheGroup(spec, layers[i : i + size]) for i in range(0, len(layers), size)]
    return groups


def cache_layout(groups: Sequence[CacheGroup]) -> CacheLayout:
    """Assign tensors to layers: the j-th layers of groups with the same shape share one, since their blocks differ."""
    slots: list[KVCacheSpec] = []
    index_of: dict[tuple[int, int, float, bool, int], int] = {}
    slot_of_layer = [0] * sum(len(group.layers) for group in groups)
    for group in groups:
        spec = group.spec
        for j, layer in enumerate(group.layers):
            shape = (spec.num_kv_heads, spec.head_dim, spec.bytes_per_element, spec.shares_values, j)
            if shape not in index_of:
                index_of[shape] = len(slots)
                slots.append(spec)
            slot_of_layer[layer] = index_of[shape]
    return CacheLayout(slots, slot_of_layer)
