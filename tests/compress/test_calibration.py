"""Where calibration tokens come from, and what each wrong source says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hub_server import hub_server
from octavo.builtin_text import builtin_text
from octavo.compress.calibration import CalibrationSpec, load_calibration
from octavo.errors import UserError


class WordTokenizer:
    """Each word is a token, its number the word's length; 1 comes first if `bos`."""

    chat_template = "yes"

    def __init__(self, bos: bool = False) -> None:
        self.bos = bos

    def __call__(self, text: str, add_special_tokens: bool = True, max_length: int | None = None, **_: Any) -> dict:
        ids = ([1] if self.bos and add_special_tokens else []) + [10 + len(word) for word in text.split()]
        return {"input_ids": ids[:max_length]}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        return " ".join(message["content"] for message in messages)


def load(dataset: Any, tokenizer: WordTokenizer | None = None, **arguments: Any) -> Any:
    return load_calibration(CalibrationSpec(dataset, **arguments), tokenizer or WordTokenizer())


def test_running_text_is_cut_into_windows_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    words = [f"w{'x' * (i % 50)}" for i in range(100)]
    path.write_text(" ".join(words))
    data = load(path, num_calibration_samples=3, max_seq_length=20)
    assert [sample.shape for sample in data.samples] == [(1, 20)] * 3
    assert torch.cat(data.samples, dim=1)[0].tolist() == [10 + len(word) for word in words[:60]]
    with_bos = load(path, WordTokenizer(bos=True), num_calibration_samples=3, max_seq_length=20)
    assert [sample[0, 0].item() for sample in with_bos.samples] == [1, 1, 1]
    assert torch.cat([s[:, 1:] for s in with_bos.samples], dim=1)[0].tolist() == [10 + len(word) for word in words[:57]]


def test_too_little_text_is_a_note_and_none_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one two three four five six seven eight nine ten")
    data = load(path, num_calibration_samples=4, max_seq_length=8)
    assert len(data.samples) == 1
    assert data.notes == [f"{path} gave 1 calibration sequences instead of 4"]
    path.write_text("")
    with pytest.raises(UserError, match="holds no text"):
        load(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_rows_of_files_are_sequences_of_their_own(suffix: str, tmp_path: Path) -> None:
    rows = [{"body": "a bb ccc"}, {"body": "dddd ee f g h i j k l m"}, {"body": "x"}]
    content = {
        ".jsonl": "\n".join(map(json.dumps, rows)),
        ".json": json.dumps(rows),
        ".csv": "body\n" + "\n".join(row["body"] for row in rows),
    }
    path = tmp_path / f"rows{suffix}"
    path.write_text(content[suffix])
    data = load(path, text_column="body", max_seq_length=8)
    assert [sample.tolist() for sample in data.samples] == [[[11, 12, 13]], [[14, 12, 11, 11, 11, 11, 11, 11]]]
    with pytest.raises(UserError, match=r"has the columns \['body'\], none of them is 'text'"):
        load(path)


def test_python_objects(tmp_path: Path) -> None:
    import datasets

    assert load(["a bb", "ccc d"]).samples[1].tolist() == [[13, 11]]
    assert load([[5, 6, 7], [8, 9]]).samples[0].tolist() == [[5, 6, 7]]
    assert load([{"input_ids": torch.tensor([[5, 6]])}]).samples[0].tolist() == [[5, 6]]
    assert load([{"messages": [{"role": "user", "content": "hi there"}]}]).samples[0].tolist() == [[12, 15]]
    table = datasets.Dataset.from_dict({"text": ["a bb", "ccc d"]})
    assert load(table).samples[1].tolist() == [[13, 11]]
    assert load(datasets.DatasetDict(train=table)).samples[1].tolist() == [[13, 11]]
    with pytest.raises(UserError, match="splits is 'test'"):
        load(datasets.DatasetDict(train=table), splits="test")
    with pytest.raises(UserError, match="dataset is a int"):
        load(5)


def test_shuffling_is_drawn_by_the_seed() -> None:
    texts = [f"{'a' * i} b" for i in range(1, 60)]
    first = load(texts, shuffle_calibration_samples=True, num_calibration_samples=5, seed=1)
    again = load(texts, shuffle_calibration_samples=True, num_calibration_samples=5, seed=1)
    other = load(texts, shuffle_calibration_samples=True, num_calibration_samples=5, seed=2)
    plain = load(texts, num_calibration_samples=5)
    assert first.digest() == again.digest()
    assert len({first.digest(), other.digest(), plain.digest()}) == 3


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not there"):
        load("nowhere.txt")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"')
    with pytest.raises(UserError, match="cannot be read"):
        load(broken)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="cannot be read"):
        load(binary)


@pytest.mark.parametrize("arguments", [{"num_calibration_samples": 0}, {"max_seq_length": 2}])
def test_bad_numbers_are_named(arguments: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(arguments))):
        CalibrationSpec(**arguments)


def test_sequences_never_exceed_the_context() -> None:
    assert CalibrationSpec().within(4096).max_seq_length == 512
    assert CalibrationSpec().within(128).max_seq_length == 128
    with pytest.raises(UserError, match="context ends at 128"):
        CalibrationSpec(max_seq_length=200).within(128)


def test_builtin_text_has_two_parts_without_a_common_paragraph() -> None:
    calibration, held_out = builtin_text("calibration"), builtin_text("heldout")
    assert len(calibration) > 200_000
    assert len(held_out) > 60_000
    paragraphs = {" ".join(p.split()) for p in calibration.split("\n\n")}
    assert not paragraphs & {" ".join(p.split()) for p in held_out.split("\n\n")}
    assert load(None, num_calibration_samples=2).source.startswith("the built-in text")
    with pytest.raises(UserError, match="calibration and heldout"):
        builtin_text("test")


_SCRIPT = """
import sys
from octavo.compress.calibration import CalibrationSpec, _rows
from octavo.errors import UserError
from octavo.evaluate.config import PerplexityConfig
from octavo.evaluate.texts import load_text
for name in sys.argv[1:]:
    try:
        rows, source, _ = _rows(CalibrationSpec(name))
        print(name, len(list(rows)), next(iter(_rows(CalibrationSpec(name, streaming=True))[0]))["text"])
    except UserError as error:
        print(name, "UserError", error)
    try:
        text, source = load_text(PerplexityConfig("m", dataset=name, dataset_split="train"))
        print(source, text.count("\\n\\n"), text[:5])
    except UserError as error:
        print(name, "UserError", error)
"""


def test_hub_data_sets_and_what_goes_wrong_with_them(tmp_path: Path) -> None:
    """The real client libraries against a server that answers as the Hub does, for `compress` and for `eval`."""
    names = ("acme/good", "acme/unknown", "acme/private", "acme/broken")
    rows = [{"text": f"Row {i} of the good data set, about rivers and bridges."} for i in range(60)]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with hub_server() as hub:
        hub.folders |= {"datasets/acme/good": tmp_path / "rows", "datasets/acme/broken": tmp_path / "rows"}
        hub.refused["datasets/acme/private"] = (401, "")
        hub.broken.add("acme/broken/train.jsonl")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", _SCRIPT, *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "acme/good 60 Row 0 of the good data set, about rivers and bridges."
    assert lines[1] == "data set acme/good, split train 59 Row 0"
    reasons = (
        "the Hub has no data set of that name",
        "the Hub refuses access (HTTP 401)",
        "it could not be downloaded",
    )
    for name, reason, calibrating, measuring in zip(names[1:], reasons, lines[2::2], lines[3::2], strict=True):
        for line in (calibrating, measuring):
            assert line.startswith(f"{name} UserError data set {name}: {reason}")
        assert "no data set for the built-in text" in calibrating
        assert "--dataset builtin" in measuring
    assert "hf auth login" in lines[4]
    assert "Try again" in lines[6]


def test_without_datasets_installed_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"octavo\[hub\]"):
        load("wikitext")
