"""How long a context and how many KV blocks the engine gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.core.cache_groups import CacheGroup, cache_layout
from octavo.engine.config import EngineConfig
from octavo.errors import CapacityError, UserError

CPU_KV_CACHE_BYTES = 4 * 2**30  # the most that is taken on a CPU without being asked to: the machine has other users
CPU_MAX_NUM_SEQS = 64
CPU_MAX_NUM_BATCHED_TOKENS = 2048
CPU_SERVING_PREFILL = 64  # with 128 a gap of 58 ms was the 99th percentile (2 cores, 135M parameters)
GPU_MAX_NUM_BLOCKS = 2**19  # a tiny model would get millions of blocks, each of them an object on the host
GPU_MAX_NUM_SEQS = 256
GPU_SERVING_MAX_NUM_SEQS = 512  # at 64 requests a second 256 were full and the rest waited; core/prefill_cap.py
GPU_PREFILL_TOKENS = 16384  # a step; with a token for each request that decodes beside them, for kernels of one size
GPU_SERVING_PREFILL_RANGE = (512, 2048)  # by the backlog: core/prefill_cap.py has the arithmetic


@dataclass(frozen=True)
class StepLimits:
    """What a step may hold, and how many steps may be launched before the first of them is collected."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_prefill_tokens_with_decodes: int | None
    prefill_cap_range: tuple[int, int] | None
    max_steps_in_flight: int
    on_gpu: bool
    uses_device_state: bool


@dataclass(frozen=True)
class KVCachePlan:
    """Sizes that were settled on. `num_blocks` counts the null block; `bytes_per_token` is what all layers store."""

    max_model_len: int
    num_blocks: int
    block_bytes: int
    bytes_per_token: int
    max_concurrency: float


def plan_kv_cache(
    config: EngineConfig, groups: list[CacheGroup], max_position: int, free_bytes: int, limits: StepLimits
) -> KVCachePlan:
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
        budget = max(0, free_bytes)
        if limits.on_gpu:
            budget = min(budget, GPU_MAX_NUM_BLOCKS * block_bytes)
        else:
            full = limits.max_num_seqs * blocks_of(groups, config, length, limits) + 1
            budget = min(budget, CPU_KV_CACHE_BYTES, full * block_bytes)
    num_blocks = budget // block_bytes
    fits = longest_that_fits(groups, config, num_blocks - 1, length, limits)
    if wanted == "auto" and fits >= config.block_size:
        length = fits
    if fits < length:
        needed = (blocks_of(groups, config, length, limits) + 1) * block_bytes
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
        max_concurrency=(num_blocks - 1) / blocks_of(groups, config, length, limits),
    )


def step_limits(config: EngineConfig, device: torch.device, is_serving: bool = False) -> StepLimits:
    """The limits of a step. Where one was not given, its default gives way to the one that was.

    Where streams are served, a step that decodes takes a small part of a prompt only.
    """
    on_gpu = device.type == "cuda"
    gpu_seqs = GPU_SERVING_MAX_NUM_SEQS if is_serving else GPU_MAX_NUM_SEQS
    default_seqs = gpu_seqs if on_gpu else CPU_MAX_NUM_SEQS
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        seqs = min(default_seqs, tokens or default_seqs)
    default_tokens = GPU_PREFILL_TOKENS + seqs if on_gpu else max(CPU_MAX_NUM_BATCHED_TOKENS, seqs)
    prefill = config.max_prefill_tokens_with_decodes
    if prefill is None and config.target_itl_ms is None and is_serving and not on_gpu:
        prefill = CPU_SERVING_PREFILL
    is_async = on_gpu if config.async_scheduling is None else config.async_scheduling
    return StepLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens or default_tokens,
        max_prefill_tokens=tokens or (GPU_PREFILL_TOKENS if on_gpu else default_tokens),
        max_prefill_tokens_with_decodes=prefill,
        prefill_cap_range=GPU_SERVING_PREFILL_RANGE if is_serving and on_gpu else None,
        max_steps_in_flight=2 if is_async else 1,
        on_gpu=on_gpu,
        uses_device_state=on_gpu or is_async,
    )


def blocks_of(groups: list[CacheGroup], config: EngineConfig, length: int, limits: StepLimits) -> int:
    """Blocks that one sequence of `length` tokens holds at most, over all groups."""
    in_flight = limits.max_num_batched_tokens * limits.max_steps_in_flight
    return sum(g.spec.behaviour.max_blocks(g.spec, length, in_flight, config.block_size) for g in groups)


def longest_that_fits(
    groups: list[CacheGroup], config: EngineConfig, num_blocks: int, limit: int, limits: StepLimits
) -> int:
    """The longest sequence, up to `limit` tokens, whose blocks are at most `num_blocks` (by bisection)."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_of(groups, config, middle, limits) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
