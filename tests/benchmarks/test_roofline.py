"""The limits of benchmarks/roofline.py against figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import roofline

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
QWEN_06B = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("config", "scheme", "expected"),
    [
        (QWEN_06B, "bf16", 3610),
        (LLAMA_8B, "bf16", 286),
        (LLAMA_8B, "fp8", 535),
        (LLAMA_8B, "w4a16", 925),
        (LLAMA_8B, "w8a8", 535),
    ],
)
def test_batch_one_is_bound_by_reading_the_weights(config: dict, scheme: str, expected: float) -> None:
    model = roofline.Model.from_config(config, scheme)
    assert 1 / model.step_seconds(1, 1, 0, 0) == pytest.approx(expected, rel=0.003)
    workload = roofline.WORKLOADS["bs1"]
    assert workload.num_tokens / model.seconds(workload) == pytest.approx(expected, rel=0.02)


def test_sizes_come_from_the_configuration() -> None:
    model = roofline.Model.from_config(LLAMA_8B, "bf16")
    assert model.kv_bytes == 131072
    assert model.head_bytes == 2 * 128256 * 4096
    assert model.layer_bytes == pytest.approx(2 * 6.979e9, rel=1e-3)


def test_a_prompt_is_bound_by_its_products_and_a_shared_prefix_is_computed_once() -> None:
    model = roofline.Model.from_config(LLAMA_8B, "bf16")
    alone = roofline.Workload(((2048, 1),))
    products = 2 * 6.979e9 * 2048 / 790e12
    scores = 4 * 32 * 4096 * 2048 * 2049 / 2 / 790e12
    assert model.seconds(alone) == pytest.approx(products + scores, rel=0.002)
    half = roofline.Workload(((2048, 1),) * 2, shared=1024)
    assert model.seconds(alone) < model.seconds(half) < 1.6 * model.seconds(alone)


def test_eight_bits_double_the_speed_of_prompts_and_four_do_not() -> None:
    prefill = roofline.WORKLOADS["prefill"]
    bf16, fp8, w4 = (roofline.Model.from_config(LLAMA_8B, s).seconds(prefill) for s in ("bf16", "fp8", "w4a16"))
    assert fp8 < 0.55 * bf16 and w4 == pytest.approx(bf16)


def test_the_table_says_what_was_met(tmp_path: Path) -> None:
    lines = [
        {"label": "a", "workload": "bs1", "wall_s": 1.0, "output_tokens": 256, "prompt_tokens": 32},
        {"label": "a", "workload": "bs1", "wall_s": 2.0, "output_tokens": 256, "prompt_tokens": 32},
        {"label": "b", "workload": "bs1", "wall_s": 1.28, "output_tokens": 256, "prompt_tokens": 32},
        {"label": "b", "workload": "prefill", "wall_s": 4.0, "output_tokens": 64, "prompt_tokens": 131072},
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    measured, baseline = roofline.read_results(path, "a"), roofline.read_results(path, "b")
    assert measured == {"bs1": 256.0} and baseline == {"bs1": 200.0, "prefill": pytest.approx(131136 / 4)}
    with pytest.raises(SystemExit, match="a, b"):
        roofline.read_results(path, None)
    rows = roofline.table(
        roofline.Model.from_config(LLAMA_8B, "bf16"), measured, baseline, {"bs1": 1.2, "prefill": 1.0}
    )
    by_name = {row[0]: row for row in rows}
    assert by_name["bs1"][3:6] == ["256", "89 %", "1.28"] and by_name["bs1"][-1] == "yes"
    assert by_name["prefill"][3] == "-" and by_name["prefill"][-1] == ""
