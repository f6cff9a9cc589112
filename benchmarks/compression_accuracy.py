"""How good a compressed checkpoint is: negative log-likelihoods of windows of a text, and tasks, item by item.

Two steps, so that the second needs neither texts nor tokenizers:

    python benchmarks/compression_accuracy.py prepare --model DIR --output demo.npz --text wiki.test.raw \\
        --calibration-text valid.txt --piqa piqa.jsonl --arc-easy arc_easy.jsonl --lambada lambada.jsonl \\
        --hellaswag hellaswag_val_full.txt.bz2
    python benchmarks/compression_accuracy.py score --model DIR --data demo.npz --checkpoint COMPRESSED --json OUT.json

`prepare` draws the calibration windows too: set 0 is the first windows of the text, the others random ones. A window
begins with what the tokenizer puts first (Gemma's <bos>, nothing for others). `score` runs transformers' model in
float32 with the checkpoint's dequantized weights (on a GPU with TF32 products: 11 significant bits, which hold a 4-bit
code times a bfloat16 scale exactly). Layers with 8-bit activations multiply the integer codes, a scale a token, by
compressed-tensors' arithmetic: largest magnitude / 127.5, rounded to nearest even, clamped to -128..127.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compression_tasks import BY_LENGTH, TASKS, draw, encode
from torch import Tensor, nn

WINDOW = 2048
DRAWS = 3
TOKENS = 16384  # a forward pass
POSITIONS = 512  # through the output layer at once: Gemma's has 262,144 rows


def prepare(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """All token ids that a comparison needs: "windows" [n, 2048], "calibration" [draws, samples, length], tasks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    first = list(tokenizer("")["input_ids"])[:1]
    arrays = {"windows": _windows(tokenizer, args.text, first, WINDOW)[: args.windows]}
    calibration = _windows(tokenizer, args.calibration_text, first, args.calibration_length)
    orders = [np.arange(len(calibration))]
    orders += [np.random.default_rng(seed).permutation(len(calibration)) for seed in range(1, DRAWS)]
    arrays["calibration"] = np.stack([calibration[np.sort(order[: args.calibration_samples])] for order in orders])
    for task, read in TASKS.items():
        if path := getattr(args, task):
            arrays |= _task_arrays(task, draw(list(read(Path(path))), args.items), tokenizer, first)
    return arrays


def _windows(tokenizer: Any, path: str, first: list[int], length: int) -> np.ndarray:
    ids = tokenizer(Path(path).read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    step = length - len(first)
    return np.array([first + ids[i : i + step] for i in range(0, len(ids) - step + 1, step)], dtype=np.int32)


def _task_arrays(task: str, items: list[Any], tokenizer: Any, first: list[int]) -> dict[str, np.ndarray]:
    """Sequences one after the other: their tokens, [item, right, length, scored, bytes] of each."""
    tokens: list[int] = []
    table = []
    for index, item in enumerate(items):
        for choice, sequence in enumerate(encode(item, tokenizer, first)):
            tokens += sequence.tokens
            table.append([index, choice == item.gold, len(sequence.tokens), sequence.scored, sequence.length])
    return {f"{task}_tokens": np.array(tokens, np.int32), f"{task}_table": np.array(table, np.int32)}


class Int8Linear(nn.Module):
    """A linear layer of int8 codes [N, K] with a scale a row, whose inputs are rounded to int8, a scale a token."""

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.codes, self.scale, self.bias = codes.float(), scale.float().view(1, -1), bias

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.abs().amax(dim=-1, keepdim=True) / 127.5).clamp(min=torch.finfo(torch.float32).tiny)
        y = nn.functional.linear((x / scale).round().clamp(-128, 127), self.codes) * (scale * self.scale)
        return y if self.bias is None else y + self.bias


class Scorer:
    """transformers' model of a plain checkpoint, which takes the weights of one compressed checkpoint after another."""

    def __init__(self, model: str, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.device = torch.device(device)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = loaded.to(self.device).eval()
        self.plain = {name: module for name, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        self.tied = self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Every weight from the checkpoint in `directory`; whatever is missing there is an error."""
        from octavo.checkpoint.base import dense
        from octavo.checkpoint.quantized import QuantizedWeight
        from octavo.checkpoint.reader import open_checkpoint

        checkpoint = open_checkpoint(directory)
        config = checkpoint.config.get("quantization_config", {})
        rounds_inputs = any(group.get("input_activations") for group in config.get("config_groups", {}).values())
        for name, module in self.plain.items():
            self.model.set_submodule(name, module)
        for name, parameter in list(self.model.named_parameters()):
            if self.tied and name == "lm_head.weight":
                continue
            module = name.rpartition(".")[0]
            weight = checkpoint.weight(module) if name.endswith(".weight") else checkpoint.tensor(name)
            if rounds_inputs and isinstance(weight, QuantizedWeight):
                self._replace(module, weight)
            else:
                parameter.copy_(dense(weight))

    def _replace(self, name: str, weight: Any) -> None:
        if weight.codes.dtype != torch.int8 or weight.offset is not None:
            raise ValueError(f"{name}: inputs are rounded, but its weight is not symmetric int8: {weight.scheme}")
        codes, scale = weight.codes.to(self.device), weight.scale.to(self.device)
        self.model.set_submodule(name, Int8Linear(codes, scale, self.plain[name].bias))

    @torch.inference_mode()
    def windows(self, windows: np.ndarray) -> list[float]:
        """The mean negative log-likelihood of each window's tokens but the first, in nats a token."""
        result: list[float] = []
        for batch in torch.from_numpy(windows).long().split(max(1, TOKENS // windows.shape[1])):
            hidden = self._hidden(batch)
            for row, tokens in zip(hidden, batch.to(self.device), strict=True):
                result.append(float(-self._log_likelihoods(row[:-1], tokens[1:])[0].double().mean()))
        return result

    @torch.inference_mode()
    def task(self, tokens: np.ndarray, table: np.ndarray, by_length: bool) -> dict[str, Any]:
        """ "right": 0 or 1 an item; "nll": mean negative log-likelihood of the right answers.

        A right answer has the highest log-likelihood (divided by its bytes if `by_length`); an item of one choice is
        right if each of its tokens is the likeliest.
        """
        ends = np.cumsum(table[:, 2])
        scores = np.zeros(len(table))
        greedy = np.zeros(len(table), dtype=bool)
        for rows in self._batches(table[:, 2]):
            parts = [torch.from_numpy(tokens[ends[r] - table[r, 2] : ends[r]]).long() for r in rows]
            hidden = self._hidden(nn.utils.rnn.pad_sequence(parts, batch_first=True))
            picked, targets = [], []
            for state, part, row in zip(hidden, parts, rows, strict=True):
                scored = int(table[row, 3])
                picked.append(state[len(part) - scored - 1 : len(part) - 1])
                targets.append(part[-scored:].to(self.device))
            log_likelihoods, likeliest = self._log_likelihoods(torch.cat(picked), torch.cat(targets))
            sizes = [len(target) for target in targets]
            for row, value, best in zip(rows, log_likelihoods.split(sizes), likeliest.split(sizes), strict=True):
                scores[row], greedy[row] = float(value.double().sum()), bool(best.all())
        return _verdicts(table, scores, greedy, by_length)

    def _hidden(self, batch: Tensor) -> Tensor:
        """States before the output layer [B, T, H]; padding lies behind, where no token that counts sees it."""
        return self.model.base_model(batch.to(self.device), use_cache=False).last_hidden_state

    def _log_likelihoods(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each target [T] after its state [T, H]; and whether it is the likeliest token."""
        values, likeliest = [], []
        for state, target in zip(states.split(POSITIONS), targets.split(POSITIONS), strict=True):
            logits = self.model.get_output_embeddings()(state)
            if (cap := getattr(self.model.config, "final_logit_softcapping", None)) is not None:
                logits = torch.tanh(logits / cap) * cap
            values.append(-nn.functional.cross_entropy(logits, target, reduction="none"))
            likeliest.append(logits.argmax(dim=-1) == target)
        return torch.cat(values), torch.cat(likeliest)

    def _batches(self, lengths: np.ndarray) -> Iterator[np.ndarray]:
        """Rows of like length, of TOKENS tokens together."""
        order = np.argsort(-lengths, kind="stable")
        start = 0
        while start < len(order):
            count = max(1, TOKENS // int(lengths[order[start]]))
            yield order[start : start + count]
            start += count


def _verdicts(table: np.ndarray, scores: np.ndarray, greedy: np.ndarray, by_length: bool) -> dict[str, Any]:
    compared = scores / table[:, 4] if by_length else scores
    right, nll = [], []
    for index in range(int(table[-1, 0]) + 1):
        rows = np.flatnonzero(table[:, 0] == index)
        gold = rows[table[rows, 1] == 1][0]
        best = rows[np.argmax(compared[rows])]
        right.append(int(best == gold if len(rows) > 1 else greedy[gold]))
        nll.append(-scores[gold])
    return {"right": "".join(map(str, right)), "nll": round(float(np.mean(nll)), 5)}


def score(scorer: Scorer, data: Any, limit: int | None = None, tasks: bool = True) -> dict[str, Any]:
    """Windows and, with `tasks`, the tasks of a prepared file. `limit`: the first windows and items only."""
    with _tf32():
        result: dict[str, Any] = {"windows": [round(x, 6) for x in scorer.windows(data["windows"][:limit])]}
        for task in TASKS:
            if tasks and f"{task}_table" in data:
                table = data[f"{task}_table"]
                if limit is not None:
                    table = table[table[:, 0] < 10 * limit]
                result[task] = scorer.task(data[f"{task}_tokens"], table, task in BY_LENGTH)
    return result


@contextmanager
def _tf32() -> Iterator[None]:
    """Products of float32 on a GPU are in TF32 while this lasts; what the process compresses next must not see it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def main() -> None:
    """`prepare` or `score`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("prepare", help="token ids of texts and tasks")
    make.add_argument("--model", required=True)
    make.add_argument("--output", required=True)
    make.add_argument("--text", required=True, help="text to score")
    make.add_argument("--windows", type=int, default=None, help="windows of the text (default: all)")
    make.add_argument("--calibration-text", required=True)
    make.add_argument("--calibration-samples", type=int, default=32)
    make.add_argument("--calibration-length", type=int, default=512)
    make.add_argument("--items", type=int, default=1000, help="items a task, drawn at random once (default: 1000)")
    for task in TASKS:
        make.add_argument(f"--{task.replace('_', '-')}")
    run = commands.add_parser("score", help="score one checkpoint")
    run.add_argument("--model", required=True, help="plain checkpoint of the same model")
    run.add_argument("--data", required=True)
    run.add_argument("--checkpoint", type=Path, help="compressed checkpoint (default: the model itself)")
    run.add_argument("--limit", type=int, help="windows, and ten times as many items a task (default: all)")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--json", required=True, type=Path)
    args = parser.parse_args()
    if args.command == "prepare":
        arrays: dict[str, Any] = prepare(args)
        np.savez_compressed(args.output, **arrays)
        return
    scorer = Scorer(args.model, args.device)
    if args.checkpoint is not None:
        scorer.load(args.checkpoint)
    result = score(scorer, np.load(args.data), args.limit)
    args.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"perplexity {np.exp(np.mean(result['windows'])):.4f} on {len(result['windows'])} windows")
    for task in TASKS:
        if task in result:
            right = result[task]["right"]
            print(f"{task}: {right.count('1') / len(right):.4f} of {len(right)}")


if __name__ == "__main__":
    main()
