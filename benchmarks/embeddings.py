"""Sentences a second of `LLM.embed` beside plain transformers, on the same encoder and texts.

    python benchmarks/embeddings.py MODEL [--count 1000] [--text FILE] [--batch 32]

Plain transformers pads batches of 32, once in the order of the texts and once sorted by length (which is what
sentence-transformers does), with mean pooling. Both sides tokenize, and all vectors are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from octavo import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, help="a text a line; those of at least 20 characters are taken")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=None, help="max_num_batched_tokens")
    options = parser.parse_args()
    texts = _read(options.text, options.count)
    llm = LLM(options.model, max_num_batched_tokens=options.tokens)
    limit = llm.engine.info.max_model_len
    expected = None
    for name, is_sorted in (("padded, as they come", False), ("padded, by length", True)):
        expected, seconds = _timed(_transformers(options.model, texts, options.batch, limit, is_sorted))
        print(f"transformers, {name:22} {len(texts) / seconds:8.1f} sentences/s")

    def embed() -> Tensor:
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        return torch.tensor([output.outputs.embedding for output in outputs])

    vectors, seconds = _timed(embed)
    print(f"LLM.embed {'':26} {len(texts) / seconds:8.1f} sentences/s")
    assert expected is not None
    cosines = (vectors * expected).sum(1)
    print(f"largest difference {(vectors - expected).abs().max():.1e}, least cosine {cosines.min():.7f}")


def _read(path: Path | None, count: int) -> list[str]:
    if path is None:
        return [f"Sentence {i}: " + "the quick brown fox jumps over the lazy dog " * (i * 7 % 11) for i in range(count)]
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if len(line) >= 20][:count]


def _timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result and the best of two runs, after one to warm up."""
    work()
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begin)
    return result, min(seconds)


def _transformers(model: str, texts: list[str], batch: int, limit: int, is_sorted: bool) -> Callable[[], Tensor]:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i])) if is_sorted else list(range(len(texts)))

    @torch.inference_mode()
    def run() -> Tensor:
        vectors = torch.empty(len(texts), encoder.config.hidden_size)
        for first in range(0, len(order), batch):
            part = order[first : first + batch]
            inputs = tokenizer(
                [texts[i] for i in part], padding=True, truncation=True, max_length=limit, return_tensors="pt"
            )
            mask = inputs["attention_mask"][..., None]
            mean = (encoder(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
            vectors[part] = torch.nn.functional.normalize(mean, dim=1)
        return vectors

    return run


if __name__ == "__main__":
    main()
