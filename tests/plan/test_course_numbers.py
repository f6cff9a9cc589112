"""The figures that the vLLM course calculates by hand; where it rounds, the exact value stands beside its words."""

from __future__ import annotations

import pytest

from octavo.plan.kv import plan_kv
from octavo.plan.memory import parse_count, plan_memory
from octavo.plan.presets import PRESETS
from octavo.plan.shape import parameters

GB = 10**9


def test_llama_3_70b_needs_320_kib_a_token():
    plan = plan_kv(PRESETS["llama-3-70b"], [1])
    assert plan.bytes_per_token == 2 * 80 * 8 * 128 * 2 == 327_680 == 320 * 1024


@pytest.mark.parametrize(
    ("tokens", "exact", "in_the_course"),
    [
        (2_000, 655_360_000, 0.64),  # "640 MB": 320 kB x 2,000
        (8_000, 2_621_440_000, 2.5),
        (32_000, 10_485_760_000, 10),
        (128_000, 41_943_040_000, 40),  # 41.9 GB = 39.1 GiB
    ],
)
def test_kv_of_one_request(tokens, exact, in_the_course):
    row = plan_kv(PRESETS["llama-3-70b"], [tokens]).rows[0]
    assert row.bytes_per_request == exact
    assert row.bytes_per_request / GB == pytest.approx(in_the_course, rel=0.05)


def test_ten_long_requests_need_over_400_gb():
    total = plan_kv(PRESETS["llama-3-70b"], [128_000], requests=10).rows[0].bytes_total
    assert total == 419_430_400_000 > 400 * GB


def test_llama_3_70b_weights_are_about_140_gb_and_the_long_request_a_third():
    weights = plan_memory(parameters(PRESETS["llama-3-70b"]), [16]).rows[0].weight_bytes
    assert weights / GB == pytest.approx(140, rel=0.01)
    assert 41.9 / (weights / GB) == pytest.approx(1 / 3, rel=0.12)


@pytest.mark.parametrize("known", [parse_count("109B"), parameters(PRESETS["llama-4-scout"])])
def test_llama_4_scout_at_16_8_and_4_bits(known):
    rows = plan_memory(known, [16, 8, 4], device_memory_bytes=80 * GB).rows
    assert [r.weight_bytes / GB for r in rows] == pytest.approx([218, 109, 54.5], rel=0.005)
    assert [r.devices for r in rows] == [3, 2, 1]
    assert [r.reduction for r in rows] == pytest.approx([0, 0.5, 0.75])


def test_the_42_percent_trap_of_qwen3():
    """The file on the Hub holds the tied LM head twice; quantizing the linear layers alone saves far less than 75 %."""
    plan = plan_memory(parameters(PRESETS["qwen3-0.6b"]), [4])
    before = 2 * plan.params + plan.duplicate_head_bytes
    after = plan.rows[0].checkpoint_bytes + plan.duplicate_head_bytes
    assert before / GB == pytest.approx(1.503, rel=0.001)  # the size of the published model.safetensors
    assert 1 - after / before == pytest.approx(0.42, abs=0.02)
    assert plan_memory(parameters(PRESETS["llama-3-70b"]), [4]).rows[0].checkpoint_reduction > 0.7  # better when large
