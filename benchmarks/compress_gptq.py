"""How long GPTQ or another algorithm takes, by phase, and the perplexity that it leaves.

Compresses a model to W4A16 in groups of 64, calibrated on the first 32 windows of 512 tokens of a text, and prints
seconds by phase. With --perplexity-file the result is loaded in transformers (float32) and scored on the first windows
of 2,048 tokens of that text. Run it on an otherwise idle machine:

    python benchmarks/compress_gptq.py --calibration-file valid.txt --perplexity-file wiki.test.raw
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer  # before the clock starts, as in the other script

from octavo.compress import run
from octavo.compress.config import CompressConfig

WINDOW = 2048


def perplexity(directory: str, text: str, windows: int) -> float:
    """exp of the mean negative log-likelihood over non-overlapping windows of the text, tokenized once."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.inference_mode():
        for window in ids[: windows * WINDOW].split(WINDOW):
            logits = model(window[None]).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
            count += len(window) - 1
    return math.exp(total / count)


def main() -> None:
    """Parse the arguments, compress, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="model to compress (default: demo)")
    parser.add_argument("--algorithm", default="gptq", help="steps joined by + (default: gptq)")
    parser.add_argument("--no-align", action="store_true", help="gptq without the stream of exact inputs")
    parser.add_argument("--samples", type=int, default=32, help="calibration windows (default: 32)")
    parser.add_argument("--length", type=int, default=512, help="tokens a window (default: 512)")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--calibration-file", help="text to calibrate on (default: the built-in text)")
    parser.add_argument("--perplexity-file", help="text to score the result on (default: none)")
    parser.add_argument("--windows", type=int, default=40, help=f"windows of {WINDOW} tokens to score (default: 40)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        report = run(
            CompressConfig(
                arguments.model, directory, scheme="W4A16", algorithm=arguments.algorithm,
                group_size=arguments.group_size, calibration_file=arguments.calibration_file,
                num_calibration_samples=arguments.samples, max_seq_length=arguments.length,
                align=not arguments.no_align,
            ),
            quiet=True,
        ).report  # fmt: skip
        seconds = time.perf_counter() - started
        environment = report["environment"]
        print(f"{environment['processor']}, {environment['threads']} threads, torch {environment['torch']}")
        print(f"| {' | '.join(report['seconds'])} | with loading |")
        print(f"| {' | '.join(f'{value:.1f}' for value in report['seconds'].values())} | {seconds:.1f} |")
        print(f"mean relative error {report['mean_error']:.5f}, peak memory {report['peak_memory_bytes'] / 1e9:.2f} GB")
        if arguments.perplexity_file:
            text = Path(arguments.perplexity_file).read_text(encoding="utf-8")
            print(f"perplexity {perplexity(directory, text, arguments.windows):.3f} ({arguments.windows} windows)")


if __name__ == "__main__":
    main()
