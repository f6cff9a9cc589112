"""benchmarks/gpu_deterministic.py on a tiny model."""

from __future__ import annotations

from pathlib import Path

import gpu_deterministic as script


def test_all_ways_are_run_and_compared(tiny_llama: Path) -> None:
    prompts = script.random_prompts(4, 20, 40, 259)
    plan = script.Plan(str(tiny_llama), prompts, 24, {"dtype": "float32", "device": "cpu"})
    rows, _, seconds = script.examine(plan, chunk=16)
    assert [row[0] for row in rows][:3] == ["in a batch", "prefix hit", "chunks of 16"]
    assert rows[3][0].endswith("preemptions") and seconds > 0
    assert all(float(row[-1]) < 1e-3 for row in rows)


def test_one_bit_and_one_token_are_noticed() -> None:
    alone = [([1, 2, 3], [-0.5, -0.25, -1.0]), ([4, 5, 6], [-1.0, -2.0, -3.0])]
    bit = [([1, 2, 3], [-0.5, -0.25000000000000006, -1.0]), alone[1]]
    token = [alone[0], ([4, 9, 6], [-1.0, -2.5, -3.0])]
    assert script.agreement(alone, alone) == (2, 2, None, 0.0)
    assert script.agreement(alone, bit)[:3] == (1, 2, 1) and script.agreement(alone, bit)[3] > 0
    assert script.agreement(alone, token) == (1, 1, 1, 0.0)
