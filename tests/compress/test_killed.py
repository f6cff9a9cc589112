"""SIGKILL at any moment: --resume ends with the bytes of a run that nothing interrupted."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count, groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.compress.work_folder import FOLDER

SCRIPT = Path(__file__).with_name("killed_run.py")


class Runs:
    """`octavo` in processes that kill themselves; see killed_run.py."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, *arguments: object, folder: Path, kill_at: int = 0) -> tuple[int, str]:
        """Exit code and what was said; -SIGKILL when it was killed, at the `kill_at`-th act below `folder`."""
        assert self.server.stdin and self.server.stdout
        job = {"kill_at": kill_at, "folder": str(folder), "arguments": [str(argument) for argument in arguments]}
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        return answer["code"], answer["said"]


@pytest.fixture(scope="module")
def octavo() -> Iterator[Runs]:
    runs = Runs()
    yield runs
    assert runs.server.stdin
    runs.server.stdin.close()
    assert runs.server.wait(30) == 0


def killed_after(seconds: float | None, *arguments: object) -> tuple[int, str]:
    """Exit code and what `octavo` said in a process of its own; -SIGKILL when it was not done in time."""
    command = [sys.executable, "-m", "octavo", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    return process.returncode, said


def acts_of(said: str) -> int:
    return int(re.findall(r"acts: (\d+)", said)[0])


def content(folder: Path) -> dict[str, Any]:
    """Every file below a folder; of the report, what is no measurement of this run."""
    files: dict[str, Any] = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    report = json.loads(files.pop("compression_report.json"))
    for changing in ("seconds", "peak_memory_bytes", "estimate"):
        report.pop(changing, None)
    return files | {"report": report}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    assert [name for name in found if found[name] != expected[name]] == []


def is_finished(folder: Path) -> bool:
    return (folder / "config.json").exists()


GPTQ = "GPTQModifier: {scheme: W4A16, group_size: 32, ignore: [lm_head]}"
RECIPES = {
    "gptq": GPTQ,
    "rtn": "QuantizationModifier: {scheme: W4A16, group_size: 32, ignore: [lm_head]}",
    "earlier": "QuantizationModifier: {scheme: W3A16, group_size: 32, ignore: [lm_head]}",
    "rotated": f"SpinQuantModifier: {{rotations: [R1, R2]}}\n    {GPTQ}",
    "pruned": "SparseGPTModifier: {sparsity: 0.5, ignore: [lm_head]}",
}


def arguments_for(model: Path, text: Path, recipe: str) -> list[object]:
    path = text.with_name(f"{recipe}.yaml")
    path.write_text(f"quant_stage:\n  quant_modifiers:\n    {RECIPES[recipe]}\n")
    return ["compress", model, "--recipe", path, "--calibration-file", text, "--num-calibration-samples", 6,
            "--max-seq-length", 32, "--device", "cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("Some say the world will end in fire, some say in ice; 12345.\n" * 30, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bfloat16_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose stored values are not what is computed with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("bfloat16")
    AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", ["gptq", "rotated", "pruned"])
def test_killed_again_and_again_it_ends_with_the_same_files(
    recipe: str, octavo: Runs, bfloat16_llama: Path, text: Path, tmp_path: Path
) -> None:
    arguments, out = arguments_for(bfloat16_llama, text, recipe), tmp_path / "killed"
    code, said = octavo(*arguments, "--output-dir", tmp_path / "whole", folder=tmp_path / "whole")
    assert code == 0, said
    acts = acts_of(said)
    expected = content(tmp_path / "whole")
    chance = random.Random(recipe)
    kills = 0
    for _ in range(8):
        shutil.rmtree(out, ignore_errors=True)
        code = -signal.SIGKILL
        while code:
            # A resumed run has fewer acts: the later ones are rarely reached again.
            number = chance.randint(1, acts)
            code, said = octavo(*arguments, "--output-dir", out, "--resume", kill_at=number, folder=out)
            assert code in (0, -signal.SIGKILL), said
            kills += code != 0
            if is_finished(out):
                same({name: value for name, value in content(out).items() if not name.startswith(FOLDER)}, expected)
        same(content(out), expected)
    assert kills >= 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_act_can_be_the_last(octavo: Runs, bfloat16_llama: Path, text: Path, tmp_path: Path) -> None:
    """A folder that holds an earlier checkpoint is that checkpoint, none, or the new one; never a mixture."""
    arguments, out = arguments_for(bfloat16_llama, text, "rtn"), tmp_path / "out"
    for name, asked in (("earlier", arguments_for(bfloat16_llama, text, "earlier")), ("new", arguments)):
        code, said = octavo(*asked, "--output-dir", tmp_path / name, folder=tmp_path / name)
        assert code == 0, said
    before, after = content(tmp_path / "earlier"), content(tmp_path / "new")
    states = []
    for number in count(1):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "earlier", out)
        code, said = octavo(*arguments, "--output-dir", out, kill_at=number, folder=out)
        if code == 0:
            break
        assert code == -signal.SIGKILL, said
        state = "none"
        if is_finished(out):
            found = {name: value for name, value in content(out).items() if not name.startswith(FOLDER)}
            state = "earlier" if found["model.safetensors"] == before["model.safetensors"] else "new"
            same(found, before if state == "earlier" else after)
        states.append(state)
        code, said = octavo(*arguments, "--output-dir", out, "--resume", folder=out)
        assert code == 0, said
        same(content(out), after)
    same(content(out), after)
    assert [state for state, _ in groupby(states)] == ["earlier", "none", "new"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_model_killed_by_the_clock(demo_path: Path, text: Path, tmp_path: Path) -> None:
    arguments, out = arguments_for(demo_path, text, "gptq"), tmp_path / "killed"
    code, said = killed_after(None, *arguments, "--output-dir", tmp_path / "whole")
    assert code == 0, said
    seconds = json.loads((tmp_path / "whole" / "compression_report.json").read_text())["seconds"]["total"]
    chance = random.Random(5)
    kills = 0
    while kills < 4:
        limit = chance.uniform(0.3, 1.0) * (seconds + 8)
        code, said = killed_after(limit, *arguments, "--output-dir", out, "--resume")
        if code == 0:
            break
        kills += 1
    if code != 0:
        code, said = killed_after(None, *arguments, "--output-dir", out, "--resume")
    assert code == 0, said
    same(content(out), content(tmp_path / "whole"))
    assert kills
