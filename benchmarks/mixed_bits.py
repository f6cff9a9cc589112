"""Bits chosen by layer against the same bits everywhere, at equal bytes on disk.

Compresses a model to a uniform width in groups of 64, then to a target size of as many bytes with widths chosen by
sensitivity, and scores both on the same windows of 2,048 tokens (transformers, float32). The difference of the negative
log-likelihoods is paired by window, its 95 % interval by bootstrap over windows:

    python benchmarks/mixed_bits.py --calibration-file valid.txt --perplexity-file wiki.test.raw
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from octavo.compress import run
from octavo.compress.config import CompressConfig

WINDOW = 2048


def losses(directory: str, text: str, windows: int) -> torch.Tensor:
    """The mean negative log-likelihood [windows] of the first windows of the text, tokenized once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for window in ids[: windows * WINDOW].split(WINDOW):
            logits = model(window[None]).logits[0, :-1]
            found.append(torch.nn.functional.cross_entropy(logits, window[1:]))
    return torch.stack(found).double()


def interval(differences: torch.Tensor, draws: int = 10_000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    chosen = torch.randint(len(differences), (draws, len(differences)), generator=torch.Generator().manual_seed(0))
    ends = differences[chosen].mean(dim=1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(ends[0]), float(ends[1])


def compressed(arguments: argparse.Namespace, directory: Path, **settings: Any) -> dict[str, Any]:
    config = CompressConfig(
        arguments.model, str(directory), algorithm=arguments.algorithm, group_size=arguments.group_size,
        calibration_file=arguments.calibration_file, num_calibration_samples=arguments.samples,
        max_seq_length=arguments.length, align=arguments.align, device="cpu", **settings,
    )  # fmt: skip
    return run(config, quiet=True).report


def main() -> None:
    """Parse the arguments, compress twice, print a row for each result and the difference."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="model to compress (default: demo)")
    parser.add_argument("--algorithm", default="gptq", choices=("gptq", "rtn"))
    parser.add_argument("--align", action=argparse.BooleanOptionalAction, default=True, help="GPTQ's aligned stream")
    parser.add_argument("--bits", type=int, default=4, choices=(3, 4), help="the uniform width (default: 4)")
    parser.add_argument("--bit-choices", default="3,4,5,6,8", help="widths to choose from (default: 3,4,5,6,8)")
    parser.add_argument("--samples", type=int, default=32, help="calibration windows (default: 32)")
    parser.add_argument("--length", type=int, default=512, help="tokens a window (default: 512)")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--calibration-file", required=True, help="text to calibrate on")
    parser.add_argument("--perplexity-file", required=True, help="text to score the results on")
    parser.add_argument("--windows", type=int, default=20, help=f"windows of {WINDOW} tokens to score (default: 20)")
    arguments = parser.parse_args()
    text = Path(arguments.perplexity_file).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        uniform, mixed = Path(folder) / "uniform", Path(folder) / "mixed"
        compressed(arguments, uniform, scheme=f"W{arguments.bits}A16")
        size = (uniform / "model.safetensors").stat().st_size
        choices = tuple(map(int, arguments.bit_choices.split(",")))
        report = compressed(arguments, mixed, target_size=str(size), bit_choices=choices)
        found = {path.name: losses(str(path), text, arguments.windows) for path in (uniform, mixed)}
        for path in (uniform, mixed):
            size = (path / "model.safetensors").stat().st_size
            print(f"{path.name}: {size} bytes, perplexity {float(found[path.name].mean().exp()):.3f}")
    difference = found["mixed"] - found["uniform"]
    low, high = interval(difference)
    print(f"layers: {json.dumps(report['mixed_precision']['layers_by_width'])}")
    print(f"mixed minus uniform: {float(difference.mean()):+.4f} [{low:+.4f}, {high:+.4f}] nats a token")


if __name__ == "__main__":
    main()
