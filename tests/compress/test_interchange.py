"""Checkpoints go both ways: Octavo's load in transformers and vLLM, LLM Compressor's load in Octavo.

The mean Kullback-Leibler divergence of the other program's predictions from Octavo's own is below 1e-3 on 2,048 tokens
of real text: in float32 where weights alone are quantized (vLLM, which has no float32 product for 4-bit weights, in
float16, for bfloat16 alone makes the predictions of the plain model differ by 9e-4), in float64 where inputs are
rounded too. There float32 does not tell: a change of the last bit of the embeddings flips some codes, thirty layers
multiply that, and the predictions move by 2e-2. So in float32 the other program may be twice as far from Octavo as it
is from itself with embeddings so changed, and each of vLLM's layers must give what Octavo's gives for the same inputs.

compressed-tensors and vLLM's kernels, for which it writes, differ in the scale of 8-bit integer inputs: largest
magnitude / 127.5 and / 127. Octavo does as vLLM; transformers is compared both as it is and with vLLM's rule.

Needs the environments `llmcompressor` and `vllm` in the folder OCTAVO_TEST_PEERS. With OCTAVO_TEST_TEXT the text is a
file's. With OCTAVO_TEST_REPORT each figure becomes a line of a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from in_double import InDouble, in_single
from torch import Tensor

from octavo import oneshot
from octavo.builtin_text import builtin_text
from octavo.checkpoint.base import dense
from octavo.checkpoint.convert import convert
from octavo.checkpoint.reader import load_tokenizer, open_checkpoint
from octavo.layers.linear import Linear
from octavo.models import load_model
from octavo.modifiers import QuantizationModifier
from octavo.ops import functions as ops_functions
from octavo.ops.functions import LAYOUTS

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from harness import Driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TOKENS = 2048
LIMIT = 1e-3
AMPLIFIED = 2.0  # times what a change of the last bit makes, where inputs are rounded
WEIGHTS_ALONE = ("W4A16", "W4A16_ASYM", "W3A16", "W8A16", "NVFP4A16", "MXFP4A16")
INPUTS_TOO = ("W8A8", "W4A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK")
INTEGER_INPUTS = ("W8A8", "W4A8")
# Written by whom; the others it refuses on a CPU, or rounds their inputs. W4A8 it reads as 4-bit weights alone where it
# is packed, as Octavo writes it; LLM Compressor's, a byte a code, goes to a kernel that rounds inputs by its own rule.
IN_VLLM = [(writer, scheme) for writer in ("octavo", "llmcompressor") for scheme in ("W4A16", "W4A16_ASYM")]
IN_VLLM += [("octavo", "W4A8")]
LAYERS_IN_VLLM = ("W8A8", "FP8_DYNAMIC")
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


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


def octavo_logits(checkpoint: Path, tokens: list[int]) -> Tensor:
    """float32 logits [T, V], as they are served in float32."""
    driver = Driver(load_model(open_checkpoint(checkpoint), dtype=torch.float32), num_blocks=TOKENS // 16 + 2)
    return logits_by(driver, tokens)


def logits_by(driver: Driver, tokens: list[int]) -> Tensor:
    sequence = driver.add(tokens)
    driver.step([(sequence, len(tokens))])
    return torch.stack([sequence.logits[position] for position in range(len(tokens))])


def octavo_logits_in_double(checkpoint: Path, tokens: list[int]) -> Tensor:
    """float32 logits [T, V] from the operations that define the results, computed in float64."""
    with patch.object(ops_functions, "LAYOUTS", [layout for layout in LAYOUTS if layout.name.startswith("torch")]):
        driver = Driver(load_model(open_checkpoint(checkpoint), dtype=torch.float32), num_blocks=TOKENS // 16 + 2)
    for cache in driver.caches:
        cache.k, cache.v = cache.k.double(), cache.v.double()
    with InDouble(), patch.object(driver.model, "compute_logits", in_single_afterwards(driver.model.compute_logits)):
        return logits_by(driver, tokens)


def in_single_afterwards(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda rows: in_single(lambda logits: logits)(function(rows))


def divergence(ours: Tensor, theirs: Tensor) -> float:
    """The mean over positions of KL(ours || theirs), from full logits [T, V]."""
    total = 0.0
    for p, q in zip(ours.split(256), theirs.split(256), strict=True):
        p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
    return total / len(ours)


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


def logits_of(
    peers: Path, program: str, checkpoint: Path, tokens: list[int], folder: Path, *arguments: str
) -> dict[str, Tensor]:
    """The other program's logits, float32 [T or T-1, V], of each variant among the arguments (see peer_logits.py)."""
    (folder / "tokens.json").write_text(json.dumps(tokens))
    interpreter = python(peers, "vllm" if program == "vllm" else "llmcompressor")
    ask(interpreter, program, checkpoint, folder / "tokens.json", folder, *arguments)
    found = {}
    for file in folder.glob("*.npy"):
        found[file.stem] = torch.from_numpy(np.load(file))
        file.unlink()  # 400 MB
    return found


def written(writer: str, scheme: str, peers: Path, plain: Path, directory: Path) -> Path:
    """The demo model rounded to nearest by `writer`, "octavo" or "llmcompressor"."""
    if writer == "octavo":
        return compressed(plain, scheme, directory)
    ask(python(peers, "llmcompressor"), "write", plain, scheme, directory)
    return directory


@pytest.mark.parametrize("scheme", WEIGHTS_ALONE)
@pytest.mark.parametrize("writer", ["octavo", "llmcompressor"])
def test_transformers_and_octavo_predict_the_same(
    writer: str, scheme: str, peers: Path, plain: Path, tokens: list[int], tmp_path: Path
) -> None:
    checkpoint = written(writer, scheme, peers, plain, tmp_path / "checkpoint")
    theirs = logits_of(peers, "transformers", checkpoint, tokens, tmp_path, "plain")["plain"]
    found = divergence(octavo_logits(checkpoint, tokens), theirs)
    record(writer=writer, reader="transformers", scheme=scheme, kl=found)
    assert found < LIMIT


@pytest.mark.parametrize("scheme", INPUTS_TOO)
@pytest.mark.parametrize("writer", ["octavo", "llmcompressor"])
def test_transformers_and_octavo_compute_the_same(
    writer: str, scheme: str, peers: Path, plain: Path, tokens: list[int], tmp_path: Path
) -> None:
    checkpoint = written(writer, scheme, peers, plain, tmp_path / "checkpoint")
    rule = "+127" if scheme in INTEGER_INPUTS else ""
    variants = ["plain", f"plain{rule}", f"nudged{rule}", f"double{rule}"]
    theirs = logits_of(peers, "transformers", checkpoint, tokens, tmp_path, "weights", *dict.fromkeys(variants))
    exactly = divergence(octavo_logits_in_double(checkpoint, tokens), theirs.pop(f"double{rule}"))
    ours, ruled = octavo_logits(checkpoint, tokens), theirs[f"plain{rule}"]
    control = divergence(ruled, theirs.pop(f"nudged{rule}"))
    found, as_it_is = divergence(ours, ruled), divergence(ours, theirs["plain"])
    record(
        writer=writer, reader="transformers", scheme=scheme, kl=as_it_is, same_rule=found, nudged=control,
        rules=divergence(ruled, theirs["plain"]), double=exactly,
    )  # fmt: skip
    differing = differing_weights(checkpoint, tmp_path / "weights.npz")
    (tmp_path / "weights.npz").unlink()  # 500 MB
    assert differing == []
    assert exactly < LIMIT
    assert found < AMPLIFIED * control
    assert as_it_is < AMPLIFIED * max(control, divergence(ruled, theirs["plain"]))


def differing_weights(checkpoint: Path, theirs: Path) -> list[str]:
    """Layers whose weights in `theirs` (name -> float32) are not exactly those that Octavo reads."""
    ours, found = open_checkpoint(checkpoint), np.load(theirs)
    names = [name for name in found if f"{name}.weight" in ours]
    assert len(names) >= len(found.files) - 1, "all but a tied output layer"
    return [name for name in names if not torch.equal(dense(ours.weight(name)).float(), torch.from_numpy(found[name]))]


@pytest.mark.parametrize(("writer", "scheme"), IN_VLLM)
def test_vllm_and_octavo_predict_the_same(
    writer: str, scheme: str, peers: Path, plain: Path, tokens: list[int], tmp_path: Path
) -> None:
    checkpoint = written(writer, scheme, peers, plain, tmp_path / "checkpoint")
    theirs = logits_of(peers, "vllm", checkpoint, tokens, tmp_path, "float16", "plain")["plain"]
    if scheme == "W4A8":  # vLLM reads it on a CPU, but does not round the inputs
        ignore_inputs(checkpoint)
    found = divergence(octavo_logits(checkpoint, tokens)[:-1], theirs)
    record(writer=writer, reader="vllm", scheme=scheme, kl=found)
    assert found < LIMIT


def ignore_inputs(checkpoint: Path) -> None:
    """Make of a checkpoint one whose weights alone are quantized."""
    config = json.loads((checkpoint / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (checkpoint / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("scheme", LAYERS_IN_VLLM)
@pytest.mark.parametrize("writer", ["octavo", "llmcompressor"])
def test_layers_of_vllm_give_the_same(
    writer: str, scheme: str, peers: Path, plain: Path, tokens: list[int], tmp_path: Path
) -> None:
    checkpoint = written(writer, scheme, peers, plain, tmp_path / "checkpoint")
    theirs = logits_of(peers, "vllm", checkpoint, tokens, tmp_path, "float32", "plain", "nudged")
    found = divergence(octavo_logits(checkpoint, tokens)[:-1], theirs["plain"])
    control = divergence(theirs["plain"], theirs["nudged"])
    (tmp_path / "few.json").write_text(json.dumps(tokens[:64]))
    ask(python(peers, "vllm"), "layers", checkpoint, tmp_path / "few.json", tmp_path, "float32")
    errors = errors_of_layers(checkpoint, tmp_path / "layers.npz")
    differing = float((errors > 1e-5).float().mean())
    record(
        writer=writer, reader="vllm", scheme=scheme, kl=found, nudged=control, rows=errors.numel(), differing=differing,
        largest=float(errors.max()),
    )  # fmt: skip
    assert errors.median() < 1e-6
    assert differing < 2e-3  # of an input between two levels, either code is right
    assert errors.max() < 1e-2  # and one step of one input makes no more
    assert found < AMPLIFIED * control


def errors_of_layers(checkpoint: Path, theirs: Path) -> Tensor:
    """How far what each layer gives in Octavo is from what it gave in `theirs`, for the inputs there: relative, float32
    [layers, T]."""
    ours, found = open_checkpoint(checkpoint), np.load(theirs)
    names = [name.removesuffix(".input") for name in found.files if name.endswith(".input")]
    assert len(names) == 4 * ours.config["num_hidden_layers"]
    errors = []
    for name in names:
        parent, _, leaf = name.rpartition(".")
        parts = [ours.weight(f"{parent}.{part}") for part in MERGED.get(leaf, (leaf,))]
        given, expected = (torch.from_numpy(found[f"{name}.{side}"]) for side in ("input", "output"))
        difference = Linear(parts, None, torch.float32)(given) - expected
        errors.append(difference.norm(dim=1) / expected.norm(dim=1))
    return torch.stack(errors)
