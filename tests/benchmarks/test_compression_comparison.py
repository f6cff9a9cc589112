"""The scripts that compare compression with LLM Compressor: prompts, scores, pairing and intervals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import compression_grid
import compression_table
import compression_tasks
import numpy as np
import pytest
import torch
from compression_accuracy import Int8Linear, Scorer
from compression_recipes import OPPONENTS, RECIPES, parse
from compression_worker import sizes
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(directory)
    return Scorer(str(directory), "cpu")


def log_likelihoods(scorer: Scorer, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = scorer.model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_windows_score_every_token_but_the_first(scorer: Scorer) -> None:
    windows = np.random.default_rng(0).integers(VOCABULARY, size=(3, 20))
    expected = [-float(log_likelihoods(scorer, window.tolist()).mean()) for window in windows]
    assert scorer.windows(windows) == pytest.approx(expected, rel=1e-5)


def test_a_task_scores_each_choice_after_its_own_context(scorer: Scorer) -> None:
    generator = np.random.default_rng(1)
    sequences = [generator.integers(VOCABULARY, size=length).tolist() for length in (9, 14, 11, 30, 12, 10)]
    scored = [2, 3, 1, 12, 4, 5]
    sums = [float(log_likelihoods(scorer, s)[-n:].sum()) for s, n in zip(sequences, scored, strict=True)]
    best = [int(np.argmax(sums[:3])), 3 + int(np.argmax(np.divide(sums[3:], [7, 1, 2])))]
    for by_length, item in ((False, 0), (True, 1)):
        rows = [[i // 3, i == best[i // 3], len(s), scored[i], (1, 1, 1, 7, 1, 2)[i]] for i, s in enumerate(sequences)]
        result = scorer.task(np.concatenate(sequences), np.array(rows), by_length)
        assert result["right"][item] == "1"
        assert result["nll"] == pytest.approx(-(sums[best[0]] + sums[best[1]]) / 2, rel=1e-4)


def test_an_item_of_one_choice_is_right_if_every_token_is_the_likeliest(scorer: Scorer) -> None:
    context = [5, 6, 7, 8]
    with torch.no_grad():
        likeliest = int(scorer.model(torch.tensor([context])).logits[0, -1].argmax())
    for last, right in ((likeliest, "1"), ((likeliest + 1) % VOCABULARY, "0")):
        assert scorer.task(np.array([*context, last]), np.array([[0, 1, 5, 1, 3]]), False)["right"] == right


def test_int8_layers_round_their_inputs_by_token() -> None:
    torch.manual_seed(0)
    codes, scale, x = torch.randint(-128, 128, (6, 16)), torch.rand(6, 1), torch.randn(2, 5, 16)
    step = x.abs().amax(-1, keepdim=True) / 127.5
    rounded = (x / step).round().clamp(-128, 127) * step
    expected = nn.functional.linear(rounded, codes * scale, torch.ones(6))
    torch.testing.assert_close(Int8Linear(codes.to(torch.int8), scale, torch.ones(6))(x), expected)


def test_prompts_are_lm_evals(tmp_path: Path) -> None:
    (tmp_path / "piqa").write_text(json.dumps({"query": "Question: How?\n", "choices": ["a", "b"], "gold": 1}))
    (tmp_path / "arc").write_text(json.dumps({"query": "Question: What?", "choices": ["a", "b"], "gold": 0}))
    assert next(compression_tasks.piqa(tmp_path / "piqa")).context == "Question: How?\nAnswer:"
    assert next(compression_tasks.arc(tmp_path / "arc")).context == "Question: What?\nAnswer:"


def test_hellaswag_capitalises_an_unfinished_second_sentence(tmp_path: Path) -> None:
    import bz2

    lines = ["Roof: A man sits. he", "2", "a [step] b", "c", "d", "e", "Roof: A man sits.", "0", "a", "b", "c", "d"]
    (tmp_path / "tasks").write_bytes(bz2.compress("\n".join(lines).encode()))
    first, second = compression_tasks.hellaswag(tmp_path / "tasks")
    assert first.context == "Roof: A man sits. He"
    assert (first.gold, first.choices[0]) == (2, "a b")
    assert second.context == "Roof: A man sits."


def test_every_opponent_is_a_recipe() -> None:
    for ours, theirs in OPPONENTS.items():
        assert ours in RECIPES["octavo"]
        assert set(theirs) <= set(RECIPES["peer"])
        assert {parse(ours)[1]} == {parse(name)[1] for name in theirs}


def entry(tool: str, draw: int, windows: list[float], right: str = "10", recipe: str = "gptq-w4") -> dict:
    return {"tool": tool, "model": "m", "recipe": recipe, "draw": draw, "windows": windows, "piqa": {"right": right}}


def test_pairs_are_of_one_draw_and_a_recipe_without_data_stands_for_all() -> None:
    entries = [entry("octavo", d, [d, d]) for d in (0, 1, 2)] + [entry("peer", d, [0, 0]) for d in (1, 2)]
    entries.append(entry("peer", 0, [7, 7], recipe="rtn-w4"))
    results = compression_table.Results(entries)
    paired = compression_table.nll_matrix(results.pairs("m", "gptq-w4", "gptq-w4"))
    assert paired.tolist() == [[1, 1], [2, 2]]
    assert len(results.pairs("m", "gptq-w4", "rtn-w4")) == 3
    once = compression_table.Results([*entries, entry("peer", 1, [0, 0], recipe="awq-w4")])
    assert compression_table.nll_matrix(once.pairs("m", "gptq-w4", "awq-w4")).tolist() == [[1, 1]]
    assert results.pairs("m", "awq-w4", "awq-w4") == []


def test_the_interval_is_that_of_the_mean() -> None:
    differences = np.random.default_rng(0).normal(-0.02, 0.1, size=400)
    mean, low, high = compression_table.interval([np.stack([differences] * 3)])
    half = 1.96 * differences.std() / 20
    assert mean == pytest.approx(differences.mean())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.15 * half)


def test_draws_that_differ_widen_the_interval() -> None:
    same, apart = np.zeros((3, 50)), np.zeros((3, 50)) + np.array([[-1.0], [0.0], [1.0]])
    assert compression_table.interval([same])[1:] == (0, 0)
    assert compression_table.interval([apart])[1] < -0.5


def test_mcnemar_counts_items_that_one_side_alone_answers() -> None:
    assert compression_table.mcnemar("1100", "1100") == 1.0
    assert compression_table.mcnemar("1" * 9 + "0", "0" * 9 + "1") == pytest.approx(2 * 11 / 1024)


def test_a_grid_goes_on_after_a_torn_line_and_repeats_errors(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    good, failed = entry("octavo", 0, [1.0]), {**entry("peer", 0, [1.0]), "error": "no"}
    path.write_text("\n".join([json.dumps(good), json.dumps(failed), '{"tool": "oct']))
    assert compression_grid.read_results(path) == [good]
    args = argparse.Namespace(
        tools=["octavo", "peer"], recipes=["rtn-w4", "gptq-w4"], draws=3, task_draws=1, limit=None
    )
    jobs = [compression_grid.key(job) for job in compression_grid.jobs({"m": ("model", "data")}, args)]
    assert len(jobs) == len(set(jobs)) == 1 + (1 + 3) + (1 + 1)  # the peer's plain GPTQ is shown for one draw
    assert jobs[0] == ("octavo", "m", "none", 0)
    assert all(job["tasks"] == (job["draw"] == 0) for job in compression_grid.jobs({"m": ("model", "data")}, args))


def test_sizes_leave_headers_out(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10), "b": torch.zeros(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert sizes(tmp_path)["tensors"] == 43
    assert sizes(tmp_path)["files"] == (tmp_path / "model.safetensors").stat().st_size
