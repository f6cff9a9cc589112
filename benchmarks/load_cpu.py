"""Seconds from a checkpoint in the page cache to a model, and the parts of `LLM(...)`, each run in a fresh process.

    python benchmarks/load_cpu.py MODEL [--runs 10]

`octavo convert demo --output-dir MODEL` writes the 269 MB checkpoint of docs/benchmarks.md. The best run is what the
code takes; the median also says what else the machine did.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

MEASURE = """
import json, sys, time
parts = {}

def timed(name, call):
    start = time.perf_counter()
    result = call()
    parts[name] = time.perf_counter() - start
    return result

model = sys.argv[1]
timed("import torch", lambda: __import__("torch"))
from octavo.engine.config import EngineConfig
from octavo.engine.loading import load
from octavo.engine.tokenizer import load_tokenizer
loaded = timed("load", lambda: load(EngineConfig(model=model, device="cpu", dtype="bfloat16")))
parts["bytes"] = loaded.model.weight_bytes()
del loaded
timed("tokenizer, with the import of transformers", lambda: load_tokenizer(model))
from octavo import LLM
timed("LLM() after that", lambda: LLM(model, device="cpu", dtype="bfloat16", kv_cache_memory_bytes=2**28))
print(json.dumps(parts))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    command = [sys.executable, "-c", MEASURE, args.model]
    runs = []
    for _ in range(args.runs + 1):  # the first one fills the page cache
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{runs[0].pop('bytes') / 1e6:.0f} MB of weights in memory; {args.runs} runs")
    for part in runs[0]:
        seconds = [run[part] for run in runs[1:]]
        print(f"{part}: best {min(seconds):.2f} s, median {statistics.median(seconds):.2f} s")


if __name__ == "__main__":
    main()
