"""Perplexity against transformers, and how a text is cut."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from octavo.errors import UserError
from octavo.evaluate import perplexity
from octavo.evaluate.config import PerplexityConfig
from octavo.evaluate.texts import load_text

TEXT = "".join(f"The {i}th line of a text that has {i * i} words, or \u00e9 so.\n" for i in range(40))


def reference(model: Path, ids: list[int], window: int, stride: int | None) -> tuple[float, int]:
    """Both protocols written out with transformers: mean over predicted tokens, in double precision."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, count, scored_to = 0.0, 0, 0
    starts = range(0, len(ids), stride) if stride else range(0, len(ids) - window + 1, window)
    for start in starts:
        end = min(start + window, len(ids))
        piece = torch.tensor([ids[start:end]])
        with torch.no_grad():
            scores = network(piece).logits[0, :-1].double().log_softmax(-1)
        picked = scores.gather(-1, piece[0, 1:, None])[:, 0]
        new = end - max(scored_to, start) if stride else len(picked)
        new = min(new, len(picked))
        total -= float(picked[len(picked) - new :].sum())
        count += new
        scored_to = end
        if stride and end == len(ids):
            break
    return math.exp(total / count), count


@pytest.mark.parametrize(
    ("protocol", "window", "stride"), [("windows", 128, 64), ("windows", 512, 64), ("sliding", 128, 50)]
)
def test_equals_transformers(tiny_llama: Path, tmp_path: Path, protocol: str, window: int, stride: int) -> None:
    from transformers import AutoTokenizer

    path, result_path = tmp_path / "text.txt", tmp_path / "result.json"
    path.write_text(TEXT, encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(tiny_llama).encode(TEXT)
    expected, count = reference(tiny_llama, ids, window, stride if protocol == "sliding" else None)
    config = PerplexityConfig(
        model=str(tiny_llama), file=str(path), protocol=protocol, window=window, stride=stride, dtype="float32",
        json=str(result_path), batch_size=3,
    )  # fmt: skip
    result = perplexity.run(config, quiet=True)
    assert result.tokens == count
    assert result.perplexity == pytest.approx(expected, rel=1e-4)
    written = json.loads(result_path.read_text())
    assert {"perplexity", "ci95", "tokens", "windows"} <= set(written)
    assert written["perplexity"] == result.perplexity
    assert written["ci95"][0] < result.perplexity < written["ci95"][1]


def test_windows_do_not_overlap_and_drop_the_tail() -> None:
    windows = perplexity.cut(1050, "windows", 100, 10)
    assert len(windows) == 10
    assert [(w.start, w.end) for w in windows[:2]] == [(0, 100), (100, 200)]
    assert {w.num_scored for w in windows} == {99}
    assert len(perplexity.cut(1050, "windows", 100, 10, max_windows=3)) == 3
    with pytest.raises(UserError, match="99 tokens, less than one window of 100"):
        perplexity.cut(99, "windows", 100, 10)


@pytest.mark.parametrize("num_tokens", [2, 64, 65, 100, 101, 500, 777])
def test_sliding_windows_score_every_token_once(num_tokens: int) -> None:
    windows = perplexity.cut(num_tokens, "sliding", 64, 10)
    scored = [t for w in windows for t in range(w.end - w.num_scored, w.end)]
    assert scored == list(range(1, num_tokens)), "every token but the first, once, in order"
    assert all(w.end - w.start <= 64 for w in windows)
    assert all(w.end - w.num_scored > w.start for w in windows), "each has at least one token of context"


def test_interval_covers_the_mean_and_shrinks() -> None:
    import random

    rng = random.Random(0)
    few = [rng.gauss(300, 30) for _ in range(10)]
    many = [rng.gauss(300, 30) for _ in range(250)]
    narrow, wide = (perplexity._interval(sums, [100] * len(sums), 0) for sums in (many, few))
    assert narrow is not None
    assert wide is not None
    assert narrow[0] < math.exp(sum(many) / 25000) < narrow[1]
    assert (narrow[1] - narrow[0]) < (wide[1] - wide[0]) / 3
    expected = 4 * 0.3 / math.sqrt(250)  # two standard errors to each side, of the mean in nats
    assert math.log(narrow[1] / narrow[0]) == pytest.approx(expected, rel=0.2)
    assert perplexity._interval([1.0], [1], 0) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give one text"),
        ({"dataset": "wikitext", "file": "x"}, "give one text"),
        ({"file": "x", "window": 1}, "--window is 1"),
        ({"file": "x", "stride": 4096, "protocol": "sliding"}, r"--stride is 4096; it must be in 1..2047"),
        ({"file": "x", "protocol": "rolling"}, "--protocol is 'rolling'"),
        ({"file": "x", "max_windows": 0}, "--max-windows is 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PerplexityConfig(model="m", **settings).check()


def test_texts(tmp_path: Path) -> None:
    text, name = load_text(PerplexityConfig(model="m", dataset="builtin"))
    assert len(text) > 100_000
    assert "held-out" in name
    path = tmp_path / "a.txt"
    path.write_bytes("a\r\nb\u00e9".encode())
    assert load_text(PerplexityConfig(model="m", file=str(path)))[0] == "a\r\nb\u00e9", "line ends are kept"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        load_text(PerplexityConfig(model="m", file=str(path)))
    with pytest.raises(UserError, match="cannot be read"):
        load_text(PerplexityConfig(model="m", file=str(tmp_path / "none")))


def test_a_data_set_that_cannot_be_had_names_the_way_out() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(UserError, match=r"data set no-such/data-set: .*--dataset builtin"):
        load_text(PerplexityConfig(model="m", dataset="no-such/data-set"))


def test_window_longer_than_the_context(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    with pytest.raises(UserError, match="512"):
        perplexity.run(PerplexityConfig(model=str(tiny_llama), file=str(path), window=1024), quiet=True)
