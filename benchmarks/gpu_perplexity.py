"""Perplexity of one model on two devices, as it is and quantized on load: is a GPU's figure the CPU's?

    python benchmarks/gpu_perplexity.py MODEL --device cpu --text FILE --json FIGURES.json
    python benchmarks/gpu_perplexity.py MODEL --device cuda --against FIGURES.json [--limit 0.5]

The first run writes figures, and the tokens that they were measured on, so that the second needs neither text nor
tokenizer. The second fails where a figure differs by more than --limit percent. Windows do not overlap; both in bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path

import torch

from octavo import LLM
from octavo.checkpoint.reader import load_tokenizer
from octavo.evaluate.perplexity import measure


def tokens_of(args: argparse.Namespace, known: dict[str, object]) -> list[int]:
    """Those of the figures that are compared with, or the first `--tokens` of the text."""
    if known:
        return list(known["token_ids"])  # type: ignore[call-overload]
    if args.text is None:
        raise SystemExit("give --text, or --against with the figures of a run that had one")
    text = args.text.read_text(encoding="utf-8")[: 16 * args.tokens]
    ids = load_tokenizer(args.model).encode(text, verbose=False)[: args.tokens]
    if len(ids) < args.tokens:
        raise SystemExit(f"{args.text} has {len(ids)} tokens; --tokens asks for {args.tokens}")
    return list(map(int, ids))


def perplexity(args: argparse.Namespace, scheme: str, token_ids: list[int]) -> tuple[float, float]:
    """Perplexity and seconds of the model with its linear layers quantized by `scheme` ("none": as they are)."""
    with LLM(
        args.model,
        dtype="bfloat16",
        device=args.device,
        quantization=None if scheme == "none" else scheme,
        max_model_len=args.window,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,  # so that a shared device serves
        skip_tokenizer_init=True,
    ) as llm:
        result = measure(llm, token_ids, window=args.window)
    gc.collect()  # the engine's memory, before the next one measures what is free
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return result.perplexity, result.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--schemes", default="none,fp8,int8,w4a16")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=0.5, help="percent")
    args = parser.parse_args()
    known = json.loads(args.against.read_text(encoding="utf-8")) if args.against else {}
    token_ids = tokens_of(args, known)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {name}; {len(token_ids)} tokens")
    print("| scheme | perplexity | compared with | difference, % | seconds |\n|---|---|---|---|---|")
    figures: dict[str, float] = {}
    wrong = []
    for scheme in args.schemes.split(","):
        figures[scheme], seconds = perplexity(args, scheme, token_ids)
        cells = ["-", "-"]
        if known:
            other = float(known["figures"][scheme])
            difference = 100 * (figures[scheme] / other - 1)
            cells = [f"{other:.4f}", f"{difference:+.3f}"]
            if not abs(difference) <= args.limit:
                wrong.append(scheme)
        print(f"| {scheme} | {figures[scheme]:.4f} | {' | '.join(cells)} | {seconds:.1f} |", flush=True)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"figures": figures, "token_ids": token_ids}), encoding="utf-8")
    if wrong:
        raise SystemExit(f"more than {args.limit:g} % apart: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
