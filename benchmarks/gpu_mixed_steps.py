"""Steps of a server with little backlog: 512 tokens of a prompt beside decodes. Attention alone, and whole steps.

    python benchmarks/gpu_mixed_steps.py CONFIG_DIR [--decodes 0,16,35,70,120] [--only attention,steps,products]

CONFIG_DIR holds a config.json (8B Llama shape); weights are made up. Three tables, after a check of each variant:

attention   us a layer in a CUDA graph, decodes of about 600 keys and 512 new tokens: every row by the prompts' kernel,
            decodes by a kernel of their own whose number is on the device, and the two calls of a step without a graph
steps       ms a step of an engine that serves, two in flight, by single calls and in a graph; ms of the host to launch
products    us a token of one layer's four products by the number of rows, and TFLOP/s
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton.testing
from gpu_attention import GPU, HEAD, SHAPES, error, exact, make_step, queries, report
from torch import Tensor

from octavo import ops
from octavo.core.sampling_params import SamplingParams
from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.graphs import decode_shapes
from octavo.engine.messages import EngineRequest
from octavo.engine.packing import PromptShape
from octavo.engine.prompt_graphs import NUM_TOKENS
from octavo.ops.triton.attention import paged_attention

PROMPT, KEYS = 512, 600
LAYERS = 8  # of the attention's caches, so that keys come from memory
HIDDEN, INNER, QKV = 4096, 14336, 6144  # of the products


def padded(meta: ops.AttentionMetadata, shape: PromptShape, on_device: bool) -> ops.AttentionMetadata:
    """The step as its graph holds it; `on_device` tells how many decode there, and otherwise nobody knows."""
    real, padding = len(meta.slot_mapping), shape.num_tokens - len(meta.slot_mapping)
    absent = shape.max_requests - len(meta.seq_lens)
    starts = meta.query_start.tolist() + [real] * absent + [shape.num_tokens]
    query_start = torch.tensor(starts, dtype=torch.int32, device=GPU)
    return replace(
        meta,
        query_start=query_start,
        seq_lens=F.pad(meta.seq_lens, (0, absent + 1)),
        block_table=F.pad(meta.block_table, (0, 0, 0, absent + 1)),
        slot_mapping=F.pad(meta.slot_mapping, (0, padding), value=-1),
        max_query_len=shape.num_tokens,
        query_lens_host=None,
        seq_lens_host=None,
        num_decodes=0,
        counts=torch.tensor([meta.num_decodes, len(meta.seq_lens)], dtype=torch.int32, device=GPU)
        if on_device
        else None,
        max_prompts=shape.max_prompts,
    )


def time_attention(q: Tensor, caches: list[ops.KVCache], meta: ops.AttentionMetadata) -> float:
    """us of one layer, in a graph that walks through the caches."""

    def run() -> None:
        for cache in caches:
            paged_attention(q, cache, meta, HEAD**-0.5, None, None, None)

    return float(triton.testing.do_bench_cudagraph(run, rep=50)) * 1e3 / len(caches)


def attention(decodes: list[int]) -> None:
    print("| decodes | graph of | all by the prompts' kernel | decodes by their own | two calls, not padded |")
    print("|---" * 5 + "|")
    for count in decodes:
        rows = [1] * count + [PROMPT]
        lengths = [KEYS - count // 2 + i for i in range(count)] + [PROMPT]
        caches, meta = make_step(rows, lengths, 16, layers=LAYERS)
        tokens = next(n for n in NUM_TOKENS if n >= sum(rows))
        shape = PromptShape(128, tokens)
        q = queries(meta, SHAPES["8B"])
        wide = F.pad(q, (0, 0, 0, 0, 0, shape.num_tokens - len(q)))
        expected = exact(q, caches[0], meta)
        cells = []
        for on_device in (False, True):
            step = padded(meta, shape, on_device)
            out = paged_attention(wide, caches[0], step, HEAD**-0.5, None, None, None)
            report(f"{count} decodes, number on the device: {on_device}", error(out[: len(q)], expected))
            cells.append(f"{time_attention(wide, caches, step):.1f}")
        cells.append(f"{time_attention(q, caches, meta):.1f}")
        print(f"| {count} | {shape.num_tokens} | " + " | ".join(cells) + " |", flush=True)


class Steps:
    """An engine in which some requests decode while one prompt after another comes."""

    def __init__(self, config: str) -> None:
        settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 8192}
        begin = time.perf_counter()
        self.engine = Engine(EngineConfig(model=config, **settings), is_serving=True)
        print(f"engine ready after {time.perf_counter() - begin:.1f} s", flush=True)
        self.runner: Any = self.engine._runner
        self.graphs = self.runner._prompt_graphs
        self.shapes = list(self.graphs._shapes)
        self._rng, self._serial = random.Random(0), 0
        self.launch_seconds = 0.0
        launch = self.runner.launch

        def timed(step: Any) -> Any:
            begin = time.perf_counter()
            try:
                return launch(step)
            finally:
                self.launch_seconds += time.perf_counter() - begin

        self.runner.launch = timed

    def add(self, max_tokens: int) -> None:
        ids = [self._rng.randrange(self.engine.info.vocab_size) for _ in range(PROMPT)]
        self._serial += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add(EngineRequest(str(self._serial), ids, params))

    def measure(self, num_decodes: int, use_graphs: bool, steps: int = 24) -> tuple[float, float]:
        """ms a step and ms of the host's launch."""
        self.graphs._shapes = self.shapes if use_graphs else []
        while len(self.engine._requests) < num_decodes:
            self.add(4000)
        while any(r.num_output_tokens < 2 for r in self.engine._scheduler.states.requests.values()):
            self.engine.step()
        best = (float("inf"), 0.0)
        for _ in range(3):
            self.engine.drain()
            self.launch_seconds, begin = 0.0, time.perf_counter()
            for _ in range(steps):
                self.add(1)
                self.engine.step()
            self.engine.drain()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            best = min(best, (seconds / steps * 1e3, self.launch_seconds / steps * 1e3))
            while len(self.engine._requests) > num_decodes:
                self.engine.step()
        return best


def whole_steps(config: str, decodes: list[int]) -> None:
    steps = Steps(config)
    tokens = sorted({shape.num_tokens for shape in steps.shapes})
    print(f"{len(decode_shapes(512, True))} decode graphs; graphs of prompts of {tokens} tokens")
    print("| decodes | single calls, ms | of which launching | in a graph, ms | of which launching |")
    print("|---" * 5 + "|")
    for count in decodes:
        cells = [f"{ms:.2f}" for use_graphs in (False, True) for ms in steps.measure(count, use_graphs)]
        print(f"| {count} | " + " | ".join(cells) + " |", flush=True)


def products() -> None:
    weights = {
        "qkv": (QKV, HIDDEN),
        "output": (HIDDEN, HIDDEN),
        "gate_up": (2 * INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }
    made = {name: torch.randn(shape, dtype=torch.bfloat16, device=GPU) for name, shape in weights.items()}
    total = sum(n * k for n, k in weights.values())
    print("| rows | " + " | ".join(weights) + " | us a token | TFLOP/s |")
    print("|---" * 7 + "|")
    for rows in (256, *range(384, 769, 32), 896, *range(1024, 4097, 128)):
        times = []
        for weight in made.values():
            x = torch.randn(rows, weight.shape[1], dtype=torch.bfloat16, device=GPU)
            times.append(float(triton.testing.do_bench_cudagraph(lambda x=x, w=weight: F.linear(x, w), rep=20)))
        cells = [f"{ms * 1e3:.0f}" for ms in times]
        rate = 2 * rows * total / sum(times) / 1e9
        print(f"| {rows} | " + " | ".join(cells) + f" | {sum(times) * 1e3 / rows:.3f} | {rate:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--decodes", default="0,16,35,70,120")
    parser.add_argument("--only", default="attention,steps,products")
    args = parser.parse_args()
    decodes = [int(n) for n in args.decodes.split(",")]
    wanted = args.only.split(",")
    with torch.inference_mode():
        if "attention" in wanted:
            attention(decodes)
        if "products" in wanted:
            products()
    torch.cuda.empty_cache()
    if "steps" in wanted:
        whole_steps(str(args.config), decodes)


if __name__ == "__main__":
    main()
