"""Limits of a step and the size of the KV cache, from numbers alone."""

from __future__ import annotations

import pytest
import torch

from octavo.core.cache_groups import CacheGroup, KVCacheSpec
from octavo.engine.config import EngineConfig
from octavo.engine.memory import GPU_MAX_NUM_BLOCKS, plan_kv_cache, step_limits
from octavo.errors import CapacityError

GROUPS = [CacheGroup(KVCacheSpec("full", 8, 128), list(range(32)))]  # Llama-3.1-8B: 2 MiB a block
CUDA = torch.device("cuda")


def test_a_gpu_takes_more_at_once_and_two_steps_ahead() -> None:
    limits = step_limits(EngineConfig(), CUDA)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_steps_in_flight) == (256, 16640, 2)
    assert limits.max_prefill_tokens == 16384
    given = step_limits(EngineConfig(max_num_batched_tokens=8192), CUDA)
    assert given.max_num_batched_tokens == given.max_prefill_tokens == 8192
    assert limits.uses_device_state
    assert step_limits(EngineConfig(), CUDA, is_serving=True).max_num_seqs == 512
    assert step_limits(EngineConfig(max_num_batched_tokens=300), CUDA, is_serving=True).max_num_seqs == 300
    one_at_a_time = step_limits(EngineConfig(async_scheduling=False), CUDA)
    assert one_at_a_time.max_steps_in_flight == 1 and one_at_a_time.uses_device_state
    cpu = step_limits(EngineConfig(), torch.device("cpu"))
    assert cpu.max_steps_in_flight == 1 and not cpu.uses_device_state


def test_a_gpu_gives_the_cache_all_that_is_left() -> None:
    config = EngineConfig()
    plan = plan_kv_cache(config, GROUPS, 131072, 100 << 30, step_limits(config, CUDA))
    assert plan.num_blocks == (100 << 30) // (2 << 20)
    assert plan.max_concurrency == pytest.approx((plan.num_blocks - 1) / 8192)
    most = plan_kv_cache(config, GROUPS, 131072, 1 << 50, step_limits(config, CUDA))
    assert most.num_blocks == GPU_MAX_NUM_BLOCKS


def test_a_step_that_takes_more_than_is_left_is_refused() -> None:
    config = EngineConfig()
    with pytest.raises(CapacityError, match="KV cache of 0 bytes"):
        plan_kv_cache(config, GROUPS, 131072, -(1 << 30), step_limits(config, CUDA))
