"""Where `octavo plan` takes a configuration and an accelerator from."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from octavo.errors import ModelNotFoundError, UserError
from octavo.plan.hardware import ACCELERATORS, find_accelerator
from octavo.plan.memory import parse_count, plan_memory
from octavo.plan.source import load_config


def test_directory_file_and_preset(tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(str(tmp_path)) == config
    assert load_config(str(tmp_path / "config.json")) == config
    assert load_config("Qwen/Qwen3-0.6B")["hidden_size"] == 1024
    assert load_config("LLAMA-3-70B")["num_hidden_layers"] == 80


@pytest.mark.parametrize(
    ("content", "problem"), [("{", "is not a JSON configuration"), ("[]", "must hold a JSON object, not a list")]
)
def test_broken_config(tmp_path, content, problem):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=problem):
        load_config(str(tmp_path))


def test_unknown_names_say_what_was_tried(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"nothing-like-it.*llama-3-70b.*owner/name"):
        load_config("nothing-like-it")
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        load_config(str(tmp_path))


def test_accelerators():
    assert find_accelerator("h200").memory_gb == 141
    assert find_accelerator("A100-80GB").name == "a100-80"
    with pytest.raises(UserError, match=r"'a100' is not known.*a100-40"):  # two sizes: ambiguous
        find_accelerator("a100")
    assert all(a.memory_gb > 0 and a.bandwidth_gbs > 0 and a.bf16_tflops > 0 for a in ACCELERATORS.values())


def test_parameter_counts():
    assert [parse_count(t) for t in ("109B", "596m", "1.1T", "7000")] == [109 * 10**9, 596 * 10**6, 11 * 10**11, 7000]
    for wrong in ("", "B", "-1B", "7 billion", "0"):
        with pytest.raises(UserError, match="no parameter count"):
            parse_count(wrong)


def test_memory_refuses_nonsense():
    with pytest.raises(UserError, match="--bits 0 is outside"):
        plan_memory(10, [0])
    with pytest.raises(UserError, match="--gpu-memory is 0"):
        plan_memory(10, [4], device_memory_bytes=0)


def test_plan_imports_neither_torch_nor_numpy():
    code = (
        "import sys, octavo.plan.kv, octavo.plan.memory, octavo.plan.hardware, octavo.plan.source; "
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
