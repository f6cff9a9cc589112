"""Compresses a model with LLM Compressor by one recipe of compression_recipes.py, on given calibration windows.

Run it with the Python of an environment that holds llmcompressor 0.14:

    PEER/bin/python benchmarks/compression_peer.py --model DIR --recipe gptq-w4 --data PREPARED.npz --output-dir OUT

PREPARED.npz is what `compression_accuracy.py prepare` writes; --draw picks one of its sets of calibration windows. The
windows go through in batches of --batch-size, which are sums in another order and else the same. LLM Compressor
takes the GPU where it sees one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from compression_recipes import PEER_RECIPES, peer_recipe


def compress(model: str, recipe: str, windows: np.ndarray, output_dir: Path, batch_size: int = 1) -> float:
    """Write the compressed checkpoint; seconds that `oneshot` took. windows: token ids int [samples, length]."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.core import reset_session
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    reset_session()
    if not torch.cuda.is_available():
        _without_pinned_memory()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = {"input_ids": windows.tolist(), "attention_mask": np.ones_like(windows).tolist()}
    modifiers = peer_recipe(recipe, loaded.config.model_type)
    started = time.perf_counter()
    data: dict[str, Any] = {}
    if PEER_RECIPES[recipe]:
        data = {
            "dataset": Dataset.from_dict(rows), "max_seq_length": windows.shape[1], "batch_size": batch_size,
            "num_calibration_samples": len(windows), "shuffle_calibration_samples": False,
        }  # fmt: skip
    oneshot(model=loaded, tokenizer=tokenizer, recipe=modifiers, output_dir=str(output_dir), **data)
    seconds = time.perf_counter() - started
    reset_session()
    return seconds


def _without_pinned_memory() -> None:
    """AWQ pins its cached inputs, which raises on a machine without a GPU; nothing else changes."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    IntermediatesCache.pin_memory = lambda self, batch_index: None  # type: ignore[method-assign]


def main() -> None:
    """One recipe from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--recipe", required=True, choices=list(PEER_RECIPES))
    parser.add_argument("--data", required=True, help="file that compression_accuracy.py prepared for this model")
    parser.add_argument("--draw", type=int, default=0, help="which calibration windows (default: 0)")
    parser.add_argument("--batch-size", type=int, default=1, help="windows a forward pass (default: 1)")
    parser.add_argument("--output-dir", required=True, type=Path)
    args = parser.parse_args()
    windows = np.load(args.data)["calibration"][args.draw]
    seconds = compress(args.model, args.recipe, windows, args.output_dir, args.batch_size)
    print(f"LLM Compressor, {args.recipe}, draw {args.draw}: {seconds:.1f} s")


if __name__ == "__main__":
    main()
