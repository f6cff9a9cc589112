"""A crash loses one block: what was finished is used again, and the files come out the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_models import tiny_model, token_samples

from octavo.compress.estimate import Needs, estimate
from octavo.compress.oneshot import oneshot
from octavo.compress.work_folder import FOLDER, WorkFolder
from octavo.errors import UserError
from octavo.modifiers import GPTQModifier
from octavo.progress import Progress


def compress(output_dir: Path, resume: bool = False, scheme: str = "W4A16", **arguments: Any) -> Any:
    size = None if scheme == "W8A8" else 32
    recipe = GPTQModifier(scheme=scheme, ignore=["lm_head"], group_size=size, **arguments.pop("gptq", {}))
    options = {"dataset": token_samples(), "recipe": recipe} | arguments
    return oneshot(tiny_model("llama", num_hidden_layers=3), output_dir=output_dir, resume=resume, **options)


def crash_after(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    original = WorkFolder.save

    def save(self: WorkFolder, index: int, *rest: Any) -> None:
        if index == blocks:
            raise KeyboardInterrupt
        original(self, index, *rest)

    monkeypatch.setattr(WorkFolder, "save", save)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_resumed_files_are_identical(
    scheme: str, batch_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"scheme": scheme, "batch_size": batch_size}
    compress(tmp_path / "whole", **arguments)
    with monkeypatch.context() as patch:
        crash_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            compress(tmp_path / "broken", **arguments)
    assert not (tmp_path / "broken" / "config.json").exists()
    done = sorted(path.name for path in (tmp_path / "broken" / FOLDER).glob("*.safetensors"))
    assert done == ["block-00000.safetensors", "block-00001.safetensors"]
    with monkeypatch.context() as patch:
        solved: list[str] = []
        original = GPTQModifier.quantize
        patch.setattr(
            GPTQModifier,
            "quantize",
            lambda self, layers, inputs: (
                solved.extend(layer.name for layer in layers) or original(self, layers, inputs)
            ),
        )
        compress(tmp_path / "broken", resume=True, **arguments)
    assert solved
    assert all(name.startswith("model.layers.2.") for name in solved)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*")}
    broken = {path.name: path.read_bytes() for path in (tmp_path / "broken").glob("*")}
    assert set(whole) == set(broken)
    for name in set(whole) - {"compression_report.json"}:
        assert whole[name] == broken[name], name
    reports = [json.loads(files["compression_report.json"]) for files in (whole, broken)]
    assert reports[0]["layers"] == reports[1]["layers"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gptq": {"dampening_frac": 0.02}}, "another recipe"),
        ({"dataset": token_samples(seed=77)}, "another calibration data"),
        ({"seed": 1}, "another seed"),
    ],
)
def test_resuming_with_something_else_is_refused(
    change: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        crash_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            compress(tmp_path)
    with pytest.raises(UserError, match=named):
        compress(tmp_path, resume=True, **change)
    compress(tmp_path, **change)  # without resume it starts anew
    assert (tmp_path / "config.json").is_file()
    assert not (tmp_path / FOLDER).exists()


def test_resuming_a_finished_run_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compress(tmp_path)
    monkeypatch.setattr(GPTQModifier, "quantize", lambda *_: pytest.fail("it was computed again"))
    again = compress(tmp_path, resume=True)
    ids = torch.tensor(token_samples(2, 16, seed=21))
    torch.testing.assert_close(again(ids).logits, first(ids).logits)
    again.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_short_memory_takes_smaller_batches_and_resume_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codes depend on the batches, so a resumed run has those that it was begun with, whatever is free by then."""
    data = {"dataset": token_samples(8, 96), "num_calibration_samples": 8}
    at_once: list[Needs] = []
    free = [1 << 40]

    def noted(*given: Any) -> Any:
        at_once.append(estimate(*given))
        return at_once[-1]

    monkeypatch.setattr("octavo.compress.job.estimate", noted)
    monkeypatch.setattr("octavo.compress.estimate.free_memory", lambda: free[0])
    compress(tmp_path / "roomy", **data)
    free[0] = sum(at_once[-1].host.values()) - at_once[-1].host["program"] - 1
    compress(tmp_path / "short", **data)
    note = "memory is short: batches of 1 sequences instead of 8"
    assert note in report_notes(tmp_path / "short")
    assert note not in report_notes(tmp_path / "roomy")
    with monkeypatch.context() as patch:
        crash_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            compress(tmp_path / "resumed", **data)
    free[0] = 1 << 40
    compress(tmp_path / "resumed", resume=True, **data)
    stored = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("roomy", "short", "resumed")}
    assert stored["resumed"] == stored["short"] != stored["roomy"]


def report_notes(folder: Path) -> list[str]:
    return json.loads((folder / "compression_report.json").read_text())["notes"]


def test_mappings_of_finished_blocks_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what lies outside the blocks counts as memory twice while shards are gathered."""
    tensors = {f"t{index}": torch.full((8,), float(index)) for index in range(6)}
    folder = WorkFolder(tmp_path, {}, resume=False)
    folder.save_outside(tensors)
    opened: list[Path] = []

    def counted(path: Path, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr("octavo.compress.work_folder.MAPPED_BYTES", 50)
    monkeypatch.setattr("octavo.compress.work_folder.safe_open", counted)
    found = dict(folder.outside() or ())
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert len(opened) == 3


def test_resume_needs_a_folder() -> None:
    with pytest.raises(UserError, match="output_dir"):
        oneshot(tiny_model("llama"), dataset=[[1, 2]], recipe=GPTQModifier(scheme="W8A16"), resume=True)


def test_progress_goes_on_from_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        crash_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            compress(tmp_path)
    shown: list[tuple[float, str | None]] = []
    monkeypatch.setattr(Progress, "update", lambda self, done, total=None, note=None: shown.append((done, note)))
    compress(tmp_path, resume=True)
    assert shown[0] == (2, "starting")
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)
    assert (2, "going through finished blocks") in shown
    assert shown[-1][0] == 3
    worst = json.loads((tmp_path / "compression_report.json").read_text())["worst_layers"]
    assert len(set(worst)) == 5
