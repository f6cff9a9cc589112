"""What is wrong with models, disks and data is said clearly, or worked around and recorded."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, token_samples

from octavo.compress.estimate import Needs, check
from octavo.compress.loaded_source import LoadedSource
from octavo.compress.oneshot import oneshot
from octavo.compress.open_source import open_source
from octavo.compress.work_folder import FOLDER, WorkFolder
from octavo.errors import CapacityError, CheckpointError, UnsupportedModelError, UserError
from octavo.modifiers import GPTQModifier, QuantizationModifier

GPTQ = {"scheme": "W4A16", "group_size": 32, "ignore": ["lm_head"]}
RTN = QuantizationModifier(scheme="W8A16", ignore=["lm_head"])


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "compression_report.json").read_text())


@pytest.mark.parametrize("text", ["", "a"])
def test_no_text_to_calibrate_on(text: str, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(text)
    with pytest.raises(UserError, match=r"empty\.txt holds no text to calibrate on"):
        oneshot(str(tiny_llama), tmp_path / "empty.txt", recipe=GPTQModifier(**GPTQ))


def test_less_text_than_was_asked_for_is_recorded(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Twenty-eight bytes of a text.")
    oneshot(str(tiny_llama), path, recipe=GPTQModifier(**GPTQ), output_dir=tmp_path / "out", max_seq_length=64)
    notes = report_of(tmp_path / "out")["notes"]
    assert f"{path} has 29 tokens, less than one sequence of 64" in notes
    assert f"{path} gave 1 calibration sequences instead of 128" in notes
    with pytest.raises(UserError, match="max_seq_length is 1024, but the model's context ends at 512"):
        oneshot(str(tiny_llama), path, recipe=GPTQModifier(**GPTQ), max_seq_length=1024)


@pytest.mark.parametrize("name", ["model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(name: str, value: float) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    with pytest.raises(CheckpointError, match=re.escape(f"{name} has 1 values that are not finite")):
        oneshot(model, token_samples(), recipe=GPTQModifier(**GPTQ))


def overflowing(model: Any, positions: slice) -> Any:
    """The model, whose first block overflows at some positions."""

    def overflow(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, positions] = torch.inf
        return output

    model.model.layers[0].mlp.register_forward_hook(overflow)
    return model


@pytest.mark.parametrize("batch_size", [None, 2])
def test_tokens_whose_activations_overflow_are_left_out_and_counted(batch_size: int | None, tmp_path: Path) -> None:
    model = overflowing(tiny_model("llama"), slice(22, 24))
    oneshot(model, token_samples(6, 24), recipe=GPTQModifier(**GPTQ), output_dir=tmp_path, batch_size=batch_size)
    report = report_of(tmp_path)
    name = "model.layers.1.self_attn.q_proj"
    assert f"{name}: 12 calibration tokens had non-finite inputs and were left out" in report["notes"]
    assert all(0 < layer["error"] < 1 for layer in report["layers"])


def test_a_layer_that_sees_no_finite_token_is_rounded(tmp_path: Path) -> None:
    model = overflowing(tiny_model("llama"), slice(None))
    oneshot(model, token_samples(), recipe=GPTQModifier(**GPTQ), output_dir=tmp_path)
    report = report_of(tmp_path)
    name = "model.layers.1.self_attn.q_proj"
    assert f"{name}: only rounded, not GPTQ: no calibration token was finite" in report["notes"]
    assert {layer["name"]: layer["algorithm"] for layer in report["layers"]}[name] == "rtn"


def test_a_layer_that_no_token_reaches_is_rounded(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.spare_proj = torch.nn.Linear(64, 32, bias=False)
    oneshot(model, token_samples(), recipe=GPTQModifier(**GPTQ), output_dir=tmp_path)
    assert any(
        "spare_proj: only rounded, not GPTQ: it saw no calibration token" in n for n in report_of(tmp_path)["notes"]
    )


def test_a_model_of_few_bits_is_not_compressed_again(tiny_llama: Path, tmp_path: Path) -> None:
    oneshot(str(tiny_llama), token_samples(), recipe=GPTQModifier(**GPTQ), output_dir=tmp_path / "four")
    with pytest.raises(
        UnsupportedModelError, match=r"quantized already \(compressed-tensors, 4-bit weights\).*original"
    ):
        open_source(str(tmp_path / "four"))
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "four")
    with pytest.raises(UnsupportedModelError, match=r"quantized already \(compressed-tensors\); load the original"):
        LoadedSource(loaded, None)


def test_a_model_of_eight_bits_is_dequantized_and_the_report_says_so(tiny_llama: Path, tmp_path: Path) -> None:
    oneshot(str(tiny_llama), recipe=RTN, output_dir=tmp_path / "eight")
    oneshot(str(tmp_path / "eight"), token_samples(), recipe=GPTQModifier(**GPTQ), output_dir=tmp_path / "four")
    report = report_of(tmp_path / "four")
    assert report["notes"][0].endswith(
        "holds 8-bit weights (compressed-tensors), which were dequantized before they were compressed"
    )
    assert {layer["num_bits"] for layer in report["layers"]} == {4}


def limited(limit: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`octavo` where no file may grow beyond `limit` bytes."""
    command = [sys.executable, "-m", "octavo", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("limit", [20_000, 60_000])
def test_a_full_disk_ends_the_run_and_it_can_be_resumed(limit: int, tiny_llama: Path, tmp_path: Path) -> None:
    """At 20 kB the first block does not fit, at 60 kB the blocks do and the checkpoint does not."""
    text = tmp_path / "text.txt"
    text.write_text("All that glitters is not gold.\n" * 40)
    arguments = ["compress", tiny_llama, "--group-size", 32, "--calibration-file", text, "--max-seq-length", 32]
    assert limited(10**9, *arguments, "--output-dir", tmp_path / "whole").returncode == 0
    full = limited(limit, *arguments, "--output-dir", tmp_path / "out")
    assert full.returncode == 1
    assert "cannot be written" in full.stderr
    assert "free some space" in full.stderr
    assert not (tmp_path / "out" / "config.json").exists()
    assert limited(10**9, *arguments, "--output-dir", tmp_path / "out", "--resume").returncode == 0
    for path in (tmp_path / "whole").glob("*"):
        if path.name != "compression_report.json":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert not (tmp_path / "out" / FOLDER).exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 64 kB; skips where none may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "octavo-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_computed(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuantizationModifier, "quantize", lambda *_: pytest.fail("it was computed"))
    with pytest.raises(CapacityError, match=r"takes about [\d.]+ kB on the disk of .*, but 65\.5 kB are free"):
        oneshot(tiny_model("llama"), recipe=RTN, output_dir=small_disk)


def test_a_disk_that_fills_up_is_named(small_disk: Path) -> None:
    folder = WorkFolder(small_disk, {"model": "m"}, resume=False)
    with pytest.raises(UserError, match=r"No space left on device.*free some space and go on with --resume"):
        folder.save(0, [], [("weight", torch.zeros(30_000))], [])
    assert not folder.has(0)


def test_memory_that_is_not_there_is_refused_with_numbers(tmp_path: Path) -> None:
    source = LoadedSource(tiny_model("llama"), None)
    with pytest.raises(
        CapacityError, match=r"takes about 1\.0 TB of memory \(activations 1\.0 TB\), but .* are free; use"
    ):
        check(Needs({"program": 5, "activations": 10**12}, {}, 0), source, tmp_path)


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("everything may be written by root")
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="may not be written"):
        WorkFolder(tmp_path, {}, resume=False)


def test_tokenizer_template_and_generation_config_come_along(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    (tmp_path / "model").mkdir()
    for path in tiny_llama.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    GenerationConfig(temperature=0.5, do_sample=True, eos_token_id=0).save_pretrained(tmp_path / "model")
    oneshot(str(tmp_path / "model"), recipe=RTN, output_dir=tmp_path / "out")
    before, after = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("model", "out"))
    assert after.chat_template == before.chat_template is not None
    assert after("to be").input_ids == before("to be").input_ids
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.5
    assert "QuantizationModifier" in (tmp_path / "out" / "recipe.yaml").read_text()
    assert not (tmp_path / "out" / FOLDER).exists()
