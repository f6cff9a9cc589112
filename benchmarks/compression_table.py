"""The comparison with LLM Compressor as Markdown tables, from the results of compression_grid.py.

    python benchmarks/compression_table.py results.jsonl > table.md

Perplexity: Octavo's minus the peer's negative log-likelihood in nats a token, paired by window of the same model and
draw; the mean over models, draws and windows, and its 95 % interval by a bootstrap that resamples windows (every draw
and recipe of a window together, for they share its text) within each model, and draws within each model. Tasks: the
difference of accuracies in percentage points, paired by item; bootstrapped over items and draws alike. A recipe without
data is one result that stands for every draw. McNemar's exact test beside it takes the first draw.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from compression_grid import read_results
from compression_recipes import OPPONENTS, RECIPES
from compression_tasks import TASKS

RESAMPLES = 4000
Result = dict[str, Any]


class Results:
    """Scores by (tool, model, recipe, draw)."""

    def __init__(self, entries: Iterable[Result]) -> None:
        self.entries = {(e["tool"], e["model"], e["recipe"], e["draw"]): e for e in entries}
        self.models = sorted({e["model"] for e in self.entries.values()})

    def find(self, tool: str, model: str, recipe: str) -> dict[int, Result]:
        """Draw -> result."""
        return {key[3]: e for key, e in self.entries.items() if key[:3] == (tool, model, recipe)}

    def pairs(self, model: str, ours: str, theirs: str) -> list[tuple[Result, Result]]:
        """Octavo's and the peer's results of the same draws; one without data is paired with each of the other's."""
        left, right = self.find("octavo", model, ours), self.find("peer", model, theirs)
        if not left or not right:
            return []
        fixed = not RECIPES["octavo"][ours] or not RECIPES["peer"][theirs]
        draws = sorted(set(left) | set(right)) if fixed else sorted(set(left) & set(right))
        return [(_of(left, draw), _of(right, draw)) for draw in draws]


def _of(found: dict[int, Result], draw: int) -> Result:
    return found[draw] if draw in found else next(iter(found.values()))


def nll_matrix(pairs: list[tuple[Result, Result]]) -> np.ndarray:
    """Differences [draws, windows]."""
    return np.array([np.subtract(ours["windows"], theirs["windows"]) for ours, theirs in pairs])


def task_matrix(pairs: list[tuple[Result, Result]], task: str) -> np.ndarray:
    """Differences of right answers in percentage points [draws, items]."""
    return np.array([100.0 * (_right(ours[task]) - _right(theirs[task])) for ours, theirs in pairs])


def _right(scores: dict[str, Any]) -> np.ndarray:
    return np.array([int(digit) for digit in scores["right"]])


def interval(matrices: list[np.ndarray], seed: int = 0) -> tuple[float, float, float]:
    """Mean over models of the mean difference, and the ends of its 95 % bootstrap interval.

    matrices: one [draws, units] a model. Units (windows, items) and draws are resampled independently in each model.
    """
    generator = np.random.default_rng(seed)
    means = np.zeros(RESAMPLES)
    for matrix in matrices:
        draws, units = matrix.shape
        for resample in range(RESAMPLES):
            rows = generator.integers(draws, size=draws)
            columns = generator.integers(units, size=units)
            means[resample] += matrix[rows].mean(axis=0)[columns].mean() / len(matrices)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(np.mean([matrix.mean() for matrix in matrices])), float(low), float(high)


def mcnemar(ours: str, theirs: str) -> float:
    """Two-sided exact p of equal accuracy, from the items that only one of the two answers right."""
    wins = sum(a > b for a, b in zip(ours, theirs, strict=True))
    losses = sum(a < b for a, b in zip(ours, theirs, strict=True))
    count, least = wins + losses, min(wins, losses)
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(least + 1)) / 2**count) if count else 1.0


def perplexity(result: Result) -> float:
    """exp of the mean over all windows, which have equally many tokens."""
    return math.exp(float(np.mean(result["windows"])))


def perplexity_table(results: Results) -> list[str]:
    """One row a pair of recipes: perplexities a model, the difference of NLL a model and over all, bytes."""
    models = results.models
    head = ["recipe", "LLM Compressor's", *(f"{m}: PPL ours / theirs" for m in models)]
    head += [*(f"{m}: dNLL" for m in models), "dNLL, all", "bytes"]
    rows = []
    for ours, theirs in _opponents():
        pairs = {model: results.pairs(model, ours, theirs) for model in models}
        if not any(pairs.values()):
            continue
        row = [ours, theirs, *(_perplexities(pairs[m]) for m in models)]
        row += [_cell([nll_matrix(pairs[m])]) if pairs[m] else "-" for m in models]
        row += [_cell([nll_matrix(p) for p in pairs.values() if p]), _bytes(pairs)]
        rows.append(row)
    return _table(head, rows)


def _perplexities(pairs: list[tuple[Result, Result]]) -> str:
    if not pairs:
        return "-"
    ours, theirs = (np.exp(np.mean([np.log(perplexity(pair[side])) for pair in pairs])) for side in (0, 1))
    return f"{ours:.2f} / {theirs:.2f}"


def _bytes(pairs: dict[str, list[tuple[Result, Result]]]) -> str:
    """Whether tensors take equally many bytes; otherwise the difference a model."""
    found = []
    for model, both in pairs.items():
        differences = {ours["bytes"]["tensors"] - theirs["bytes"]["tensors"] for ours, theirs in both}
        found += [f"{model} {difference:+,}" for difference in sorted(differences) if difference]
    return "equal" if not found else "; ".join(found)


def task_table(results: Results, model: str) -> list[str]:
    """One row a pair of recipes: accuracies and the paired difference in points, a task."""
    head = ["recipe", "LLM Compressor's", *TASKS, "all four"]
    rows = []
    for ours, theirs in _opponents():
        every = results.pairs(model, ours, theirs)
        pairs = [pair for pair in every if all(task in e for task in TASKS for e in pair)]
        tasks = [task for task in TASKS if pairs]
        if not tasks:
            continue
        row = [ours, theirs, *(_task_cell(pairs, task) if task in tasks else "-" for task in TASKS)]
        everything = np.concatenate([task_matrix(pairs, task) for task in tasks], axis=1)
        rows.append([*row, _cell([everything], ".2f")])
    return _table(head, rows)


def _task_cell(pairs: list[tuple[Result, Result]], task: str) -> str:
    ours, theirs = (np.mean([100 * _right(pair[side][task]).mean() for pair in pairs]) for side in (0, 1))
    p = mcnemar(pairs[0][0][task]["right"], pairs[0][1][task]["right"])
    return f"{ours:.1f} / {theirs:.1f}, {_cell([task_matrix(pairs, task)], '.1f')}, p {p:.2f}"


def baseline_table(results: Results) -> list[str]:
    """What the models score before compression."""
    head = ["model", "PPL", *TASKS, "bytes"]
    rows = []
    for model in results.models:
        for entry in results.find("octavo", model, "none").values():
            tasks = [f"{100 * _right(entry[t]).mean():.1f}" if t in entry else "-" for t in TASKS]
            rows.append([model, f"{perplexity(entry):.2f}", *tasks, f"{entry['bytes']['tensors']:,}"])
    return _table(head, rows)


def every_result(results: Results) -> list[str]:
    """Each job on a line: what it scored, seconds."""
    head = ["model", "tool", "recipe", "draw", "PPL", *TASKS, "bytes", "seconds"]
    rows = []
    for (tool, model, recipe, draw), e in sorted(results.entries.items(), key=lambda item: item[0][1:] + item[0][:1]):
        tasks = [f"{100 * _right(e[t]).mean():.1f}" if t in e else "-" for t in TASKS]
        size = f"{e['bytes']['tensors']:,}"
        rows.append([model, tool, recipe, str(draw), f"{perplexity(e):.3f}", *tasks, size, str(e.get("seconds", "-"))])
    return _table(head, rows)


def _opponents() -> list[tuple[str, str]]:
    return [(ours, theirs) for ours, all_theirs in OPPONENTS.items() for theirs in all_theirs]


def _cell(matrices: list[np.ndarray], form: str = ".4f") -> str:
    mean, low, high = interval(matrices)
    return f"{mean:+{form}} [{low:+{form}}, {high:+{form}}]"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results.jsonl of compression_grid.py")
    parser.add_argument("--every", action="store_true", help="print each job's scores as well")
    args = parser.parse_args()
    results = Results(entry for path in args.results for entry in read_results(path))
    sections: list[tuple[str, Callable[[], list[str]]]] = [
        ("Not compressed", lambda: baseline_table(results)),
        ("Perplexity", lambda: perplexity_table(results)),
        *((f"Tasks, {model}", lambda model=model: task_table(results, model)) for model in results.models),
    ]
    if args.every:
        sections.append(("Every result", lambda: every_result(results)))
    for title, table in sections:
        print("\n".join([f"### {title}", "", *table(), ""]))


if __name__ == "__main__":
    main()
