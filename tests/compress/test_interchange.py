"""Checkpoints go both ways: Octavo's load in transformers and vLLM, LLM Compressor's load in Octavo.

Where weights alone are quantized, the mean Kullback-Leibler divergence of the other program's predictions from Octavo's
own is below 1e-3 on 2,048 tokens of real text. Where inputs are rounded too, a change of the embeddings by 1e-7 moves
the demo model's predictions by 2e-2 (some codes flip, and thirty layers multiply that), so nothing but the same sums in
the same order would pass; there every weight is the same number instead.

Needs the environments `llmcompressor` and `vllm` in the folder OCTAVO_TEST_PEERS. With OCTAVO_TEST_TEXT the text is a
file's. With OCTAVO_TEST_REPORT each figure becomes a line of a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import oneshot
from octavo.builtin_text import builtin_text
from octavo.checkpoint.base import dense
from octavo.checkpoint.convert import convert
from octavo.checkpoint.reader import load_tokenizer, open_checkpoint
from octavo.models import load_model
from octavo.modifiers import QuantizationModifier

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from harness import Driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TOKENS = 2048
LIMIT = 1e-3
WEIGHTS_ALONE = ("W4A16", "W4A16_ASYM", "W3A16", "W8A16", "NVFP4A16", "MXFP4A16")
INPUTS_TOO = ("W8A8", "W4A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK")
IN_VLLM = ("W4A16", "W4A16_ASYM", "W8A16")


@pytest.fixture(scope="module")
def peers() -> Path:
    """The folder of the other programs' environments."""
    folder = os.environ.get("OCTAVO_TEST_PEERS")
    if not folder:
        pytest.skip("OCTAVO_TEST_PEERS names no folder of other programs' environments")
    return Path(folder)


@pytest.fixture(scope="module")
def plain(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as bfloat16 safetensors."""
    directory = tmp_path_factory.mktemp("plain") / "demo"
    convert(str(demo_path), directory)
    return directory


@pytest.fixture(scope="module")
def tokens(plain: Path) -> list[int]:
    named = os.environ.get("OCTAVO_TEST_TEXT")
    text = Path(named).read_text(encoding="utf-8") if named else builtin_text("heldout")
    return load_tokenizer(plain)(text, add_special_tokens=False, verbose=False)["input_ids"][:TOKENS]


def python(peers: Path, name: str) -> str:
    found = peers / name / "bin" / "python"
    if not found.is_file():
        pytest.skip(f"there is no environment {name} in {peers}")
    return str(found)


def ask(python: str, *arguments: str | Path) -> None:
    """Run peer_logits.py in the peer's environment."""
    command = [python, str(Path(__file__).with_name("peer_logits.py")), *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def octavo_logits(checkpoint: Path, tokens: list[int], dtype: torch.dtype) -> Tensor:
    """float32 logits [T, V]."""
    driver = Driver(load_model(open_checkpoint(checkpoint), dtype=dtype), num_blocks=TOKENS // 16 + 2)
    sequence = driver.add(tokens)
    driver.step([(sequence, len(tokens))])
    return torch.stack([sequence.logits[position] for position in range(len(tokens))])


def divergence(ours: Tensor, theirs: Tensor) -> float:
    """The mean over positions of KL(ours || theirs), from full logits [T, V]."""
    total = 0.0
    for p, q in zip(ours.split(256), theirs.split(256), strict=True):
        p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
    return total / len(ours)


def divergence_of_likeliest(ours: Tensor, ids: Tensor, theirs: Tensor) -> float:
    """The same from log-probabilities [T, n] of their likeliest tokens; all others count as one event."""
    p = torch.cat(
        [rows.double().log_softmax(-1).gather(1, i) for rows, i in zip(ours.split(256), ids.split(256), strict=True)]
    )
    inside = (p.exp() * (p - theirs)).sum(-1)
    rest_p, rest_q = ((1 - x.exp().sum(-1)).clamp_min(1e-12) for x in (p, theirs))
    return float((inside + rest_p * (rest_p / rest_q).log()).mean())


def record(**figures: object) -> None:
    """For the tables of docs/compression.md."""
    if report := os.environ.get("OCTAVO_TEST_REPORT"):
        with open(report, "a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")


def compressed(plain: Path, scheme: str, directory: Path) -> Path:
    """The demo model rounded to nearest by Octavo."""
    text = [builtin_text("calibration")[:4000]]  # for the static scale of FP8's inputs
    recipe = QuantizationModifier(scheme=scheme, ignore=["lm_head"])
    oneshot(str(plain), dataset=text, recipe=recipe, output_dir=directory, num_calibration_samples=1)
    return directory


@pytest.mark.parametrize("scheme", WEIGHTS_ALONE)
def test_transformers_reads_ours(scheme: str, peers: Path, plain: Path, tokens: list[int], tmp_path: Path) -> None:
    interpreter = python(peers, "llmcompressor")
    checkpoint = compressed(plain, scheme, tmp_path / "checkpoint")
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    ask(interpreter, "transformers", checkpoint, tmp_path / "tokens.json", tmp_path / "logits.npy")
    theirs = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    found = divergence(octavo_logits(checkpoint, tokens, torch.float32), theirs)
    (tmp_path / "logits.npy").unlink()
    record(direction="octavo -> transformers", scheme=scheme, kl=found)
    assert found < LIMIT


@pytest.mark.parametrize("scheme", INPUTS_TOO)
@pytest.mark.parametrize("writer", ["octavo", "llmcompressor"])
def test_weights_are_the_same_numbers(
    writer: str, scheme: str, peers: Path, plain: Path, tokens: list[int], tmp_path: Path
) -> None:
    interpreter = python(peers, "llmcompressor")
    checkpoint = tmp_path / "checkpoint"
    if writer == "octavo":
        compressed(plain, scheme, checkpoint)
    else:
        ask(interpreter, "write", plain, scheme, checkpoint)
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    ask(interpreter, "weights", checkpoint, tmp_path / "tokens.json", tmp_path / "weights.npz")
    assert differing_weights(checkpoint, tmp_path / "weights.npz") == []


def differing_weights(checkpoint: Path, theirs: Path) -> list[str]:
    """Layers whose weights in `theirs` (name -> float32) are not exactly those that Octavo reads."""
    ours, found = open_checkpoint(checkpoint), np.load(theirs)
    names = [name for name in found if f"{name}.weight" in ours]
    assert len(names) >= len(found.files) - 1, "all but a tied output layer"
    return [name for name in names if not torch.equal(dense(ours.weight(name)).float(), torch.from_numpy(found[name]))]


@pytest.mark.parametrize("scheme", IN_VLLM)
def test_vllm_reads_ours(scheme: str, peers: Path, plain: Path, tokens: list[int], tmp_path: Path) -> None:
    interpreter = python(peers, "vllm")
    checkpoint = compressed(plain, scheme, tmp_path / "checkpoint")
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    ask(interpreter, "vllm", checkpoint, tmp_path / "tokens.json", tmp_path / "best.npz")
    best = np.load(tmp_path / "best.npz")
    ours = octavo_logits(checkpoint, tokens, torch.bfloat16)[:-1]
    found = divergence_of_likeliest(ours, torch.from_numpy(best["ids"]), torch.from_numpy(best["logprobs"]))
    record(direction="octavo -> vllm", scheme=scheme, kl=found)
    assert found < LIMIT


@pytest.mark.parametrize("scheme", WEIGHTS_ALONE)
def test_octavo_reads_llm_compressors(scheme: str, peers: Path, plain: Path, tokens: list[int], tmp_path: Path) -> None:
    interpreter = python(peers, "llmcompressor")
    checkpoint = tmp_path / "checkpoint"
    ask(interpreter, "write", plain, scheme, checkpoint)
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    ask(interpreter, "transformers", checkpoint, tmp_path / "tokens.json", tmp_path / "logits.npy")
    theirs = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    found = divergence(octavo_logits(checkpoint, tokens, torch.float32), theirs)
    (tmp_path / "logits.npy").unlink()
    record(direction="llm-compressor -> octavo", scheme=scheme, kl=found)
    assert found < LIMIT
