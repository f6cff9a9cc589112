"""How long a context and how many KV blocks the engine gets."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.cache_groups import CacheGroup, cache_layout
from octavo.engine.config import EngineConfig
from octavo.errors import CapacityError, UserError

CPU_KV_CACHE_BYTES = 4 * 2**30  # the most that is taken on a CPU without being asked to: the machine has other users
CPU_MAX_NUM_SEQS = 64
CPU_MAX_NUM_BATCHED_TOKENS = 2048


@dataclass(frozen=True)
class KVCachePlan:
    """Sizes that were settled on. `num_blocks` counts the null block; `bytes_per_token` is what all layers store."""

    max_model_len: int
    num_blocks: int
    block_bytes: int
    bytes_per_token: int
    max_concurrency: float


def plan_kv_cache(config: EngineConfig, groups: list[CacheGroup], max_position: int, free_bytes: int) -> KVCachePlan:
    """Settle the context length and the number of blocks.

    `free_bytes` is what is left for the cache. Raises CapacityError when not even one sequence of the asked length
    fits, with the length that would.
    """
    block_bytes = cache_layout(groups).bytes_per_block(config.block_size)
    wanted = config.max_model_len
    if isinstance(wanted, int) and wanted > max_position:
        raise UserError(
            f"max_model_len is {wanted}; the model was made for at most {max_position} tokens", param="max_model_len"
        )
    length = wanted if isinstance(wanted, int) else max_position
    budget = config.kv_cache_memory_bytes
    if budget is None:
        full = step_limits(config)[0] * blocks_of(groups, config, length) + 1
        budget = min(free_bytes, CPU_KV_CACHE_BYTES, full * block_bytes)
    num_blocks = budget // block_bytes
    fits = longest_that_fits(groups, config, num_blocks - 1, length)
    if wanted == "auto" and fits >= config.block_size:
        length = fits
    if fits < length:
        needed = (blocks_of(groups, config, length) + 1) * block_bytes
        shorter = f", or max_model_len at most {fits} (or 'auto')" if fits else ""
        raise CapacityError(
            f"the KV cache of {budget:,} bytes holds a sequence of {fits} tokens at most, less than "
            f"max_model_len = {length}; give kv_cache_memory_bytes at least {needed}{shorter}",
            param="max_model_len",
        )
    return KVCachePlan(
        max_model_len=length,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        bytes_per_token=sum(group.spec.bytes_per_token * len(group.layers) for group in groups),
        max_concurrency=(num_blocks - 1) / blocks_of(groups, config, length),
    )


def step_limits(config: EngineConfig) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens). Where one was not given, its default gives way to the one that was."""
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        seqs = min(CPU_MAX_NUM_SEQS, tokens or CPU_MAX_NUM_SEQS)
    return seqs, max(CPU_MAX_NUM_BATCHED_TOKENS, seqs) if tokens is None else tokens


def blocks_of(groups: list[CacheGroup], config: EngineConfig, length: int) -> int:
    """Blocks that one sequence of `length` tokens holds at most, over all groups."""
    in_flight = step_limits(config)[1]
    return sum(g.spec.behaviour.max_blocks(g.spec, length, in_flight, config.block_size) for g in groups)


def longest_that_fits(groups: list[CacheGroup], config: EngineConfig, num_blocks: int, limit: int) -> int:
    """The longest sequence, up to `limit` tokens, whose blocks are at most `num_blocks` (by bisection)."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_of(groups, config, middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
