"""What the hardware allows on the GPU workloads, and how far a measurement is from it. Needs no GPU and no package.

    python benchmarks/roofline.py CONFIG_DIR --scheme bf16|fp8|w4a16|w8a8
        [--measured RUN.jsonl] [--baseline VLLM.jsonl --baseline-label LABEL] [--targets COLUMN]

A step's matrix products take the longer of reading the weights once and computing; its attention the longer of reading
the KV cache of every request and computing; the two follow one another. Prompts come first, in one step that reads the
weights once, then all requests decode together, one step a token. Only what cannot be avoided is counted: no norms, no
activations, no launches. The output layer is bf16 and has a row a sampled token. A shared prefix is computed once, and
read by each request. RUN.jsonl has lines {"label", "workload", "wall_s", "output_tokens", "prompt_tokens"}.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES_PER_SECOND = 4.3e12  # a device-to-device copy on one H200
OPERATIONS_PER_SECOND = 790e12  # a large bf16 product on random data
GROUP_SIZE = 128
KV_BYTES = 2

# bytes a weight, bytes of scales a row of weights, and how many times faster than in bf16 the products run
SCHEMES = {
    "bf16": (2.0, 0, 1),
    "fp8": (1.0, 2, 2),
    "w8a8": (1.0, 2, 2),
    "w4a16": (0.5 + 2 / GROUP_SIZE, 0, 1),
}

# Multiples of the baseline to reach; None: another rule holds there (4-bit weights: as many tokens as in bf16).
ROWS = ("bs1", "bs8", "bs32", "bs256", "mix256", "prefill", "noprefix", "long", "prefix75")
TARGETS: dict[str, tuple[float | None, ...]] = {
    "small": (2.6, 2.0, 1.6, 1.2, 1.2, 1.0, 1.0, 1.0, 1.05),
    "bf16": (1.2, 1.15, 1.1, 1.08, 1.08, 1.0, 1.0, 1.0, 1.05),
    "fp8": (1.4, 1.3, 1.25, 1.15, 1.15, 1.0, 1.0, 1.0, 1.05),
    "w4a16": (2.2, 1.6, 1.4, None, None, 1.0, 1.0, 1.0, 1.05),
    "w8a8": (1.5, 1.35, 1.2, 1.12, 1.12, 1.0, 1.0, 1.0, 1.05),
}


@dataclass(frozen=True)
class Workload:
    """(prompt tokens, output tokens) of each request; the first `shared` prompt tokens are the same in all."""

    requests: tuple[tuple[int, int], ...]
    shared: int = 0
    counts_prompts: bool = False  # whether its figure is all tokens or output tokens a second

    @property
    def num_tokens(self) -> int:
        return sum(o + p * self.counts_prompts for p, o in self.requests)


def _mixed(count: int) -> tuple[tuple[int, int], ...]:
    draw = random.Random("mix256/0").randint
    return tuple((draw(100, 1024), draw(100, 1024)) for _ in range(count))


WORKLOADS = {
    "bs1": Workload(((32, 256),)),
    "bs8": Workload(((512, 256),) * 8),
    "bs32": Workload(((512, 256),) * 32),
    "bs256": Workload(((512, 256),) * 256),
    "prefill": Workload(((2048, 1),) * 64, counts_prompts=True),
    "noprefix": Workload(((2048, 32),) * 64, counts_prompts=True),
    "prefix75": Workload(((2048, 32),) * 64, shared=1536, counts_prompts=True),
    "long": Workload(((30_000, 64),) * 8, counts_prompts=True),
    "mix256": Workload(_mixed(256)),
}


@dataclass(frozen=True)
class Model:
    """What a step must read and compute; sizes in bytes and operations."""

    layer_bytes: float  # the linear layers' weights and scales
    head_bytes: float  # the output layer
    layer_ops: float  # a token, in the linear layers, as time on bf16 units: already divided by the scheme's speed
    head_ops: float  # a sampled token
    kv_bytes: float  # a token of context
    attention_ops: float  # a query and a key that it sees

    @classmethod
    def from_config(cls, config: dict[str, Any], scheme: str) -> Model:
        hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        q, kv = heads * head_dim, kv_heads * head_dim
        weights = layers * (hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner)
        rows = layers * (q + 2 * kv + hidden + 2 * inner + hidden)
        weight_bytes, scale_bytes, speed = SCHEMES[scheme]
        head = config["vocab_size"] * hidden
        return cls(
            layer_bytes=weights * weight_bytes + rows * scale_bytes,
            head_bytes=2.0 * head,
            layer_ops=2.0 * weights / speed,
            head_ops=2.0 * head,
            kv_bytes=2.0 * layers * kv * KV_BYTES,
            attention_ops=4.0 * layers * q,
        )

    def step_seconds(self, tokens: int, sampled: int, kv_tokens: int, pairs: float) -> float:
        """A step of `tokens` new tokens that reads `kv_tokens` of cache and scores `pairs` of query and key."""
        products = (self.layer_ops * tokens + self.head_ops * sampled) / OPERATIONS_PER_SECOND
        weights = (self.layer_bytes + self.head_bytes) / BYTES_PER_SECOND
        scores = self.attention_ops * pairs / OPERATIONS_PER_SECOND
        return max(products, weights) + max(scores, self.kv_bytes * kv_tokens / BYTES_PER_SECOND)

    def seconds(self, workload: Workload) -> float:
        """The least time for a workload."""
        requests, shared = workload.requests, workload.shared
        own = [p - shared for p, _ in requests]
        pairs = sum(n * shared + n * (n + 1) / 2 for n in own) + shared * (shared + 1) / 2
        total = self.step_seconds(shared + sum(own), len(requests), 0, pairs)
        for step in range(1, max(o for _, o in requests)):
            contexts = [p + step for p, o in requests if o > step]
            total += self.step_seconds(len(contexts), len(contexts), sum(contexts), sum(contexts))
        return total


def read_results(path: Path, label: str | None) -> dict[str, float]:
    """Workload -> tokens a second, the best of several lines; of one label where the file has several."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    labels = sorted({line["label"] for line in lines})
    if label is None and len(labels) > 1:
        raise SystemExit(f"{path} has the labels {', '.join(labels)}; name one")
    best: dict[str, float] = {}
    for line in lines:
        name = line["workload"]
        if name in WORKLOADS and label in (None, line["label"]):
            tokens = line["output_tokens"] + line["prompt_tokens"] * WORKLOADS[name].counts_prompts
            best[name] = max(best.get(name, 0.0), tokens / line["wall_s"])
    if not best:
        raise SystemExit(f"{path} has no line with the label {label!r}; it has {', '.join(labels)}")
    return best


def table(
    model: Model, measured: dict[str, float], baseline: dict[str, float], targets: dict[str, float | None]
) -> list[list[str]]:
    """Rows of workload, limit in seconds and tokens a second, measured, % of the limit, multiples, target, met."""
    rows = []
    for name, workload in WORKLOADS.items():
        seconds = model.seconds(workload)
        limit = workload.num_tokens / seconds
        figure, base, target = measured.get(name), baseline.get(name), targets.get(name)
        multiple = figure / base if figure and base else None
        is_met = "" if multiple is None or target is None else "yes" if multiple >= target else "no"
        rows.append([
            name,
            f"{seconds:.3f}",
            f"{limit:,.0f}",
            f"{figure:,.0f}" if figure else "-",
            f"{100 * figure / limit:.0f} %" if figure else "-",
            f"{multiple:.2f}" if multiple else "-",
            f"{limit / base:.2f}" if base else "-",
            f"{target:.2f}" if target is not None else "-",
            is_met,
        ])  # fmt: skip
    return rows


HEADER = ["workload", "limit s", "limit tok/s", "measured", "of limit", "x base", "x allowed", "target x", "met"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="directory with config.json")
    parser.add_argument("--scheme", choices=tuple(SCHEMES), default="bf16")
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--label", help="label of the measured lines, where the file has several")
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--baseline-label")
    parser.add_argument("--targets", choices=tuple(TARGETS), help="column of targets")
    args = parser.parse_args()
    model = Model.from_config(json.loads((args.config / "config.json").read_text()), args.scheme)
    measured = read_results(args.measured, args.label) if args.measured else {}
    baseline = read_results(args.baseline, args.baseline_label) if args.baseline else {}
    targets = dict(zip(ROWS, TARGETS[args.targets], strict=True)) if args.targets else {}
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    for row in table(model, measured, baseline, targets):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
