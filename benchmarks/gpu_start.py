"""Where the start of an engine goes: each in a process of its own, with cold and with warm caches of kernels.

    python benchmarks/gpu_start.py CONFIG_DIR [--runs cold,warm,warm,plain] [--set KEY=JSON ...]

One line a start, in seconds: imports (torch and ours), the phases that the engine tells at INFO, all of `LLM()`, and
all with the imports. "plain" is a warm start that does not find FlashAttention 4. "rehearsing" is how long shapes were
run before they were captured, of decodes and of prompts, "recording" how long decodes were captured; both lie in the
phases memory, decode graphs and prompt graphs. The weights are made up. Kernels are kept in a folder that is new for
each call of this script, so the first run is a cold one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

BEGIN = time.perf_counter()
PHASES = ("weights", "libraries", "kernels", "plans", "memory", "decode graphs", "prompt graphs")


def start(config: str, settings: dict[str, object]) -> None:
    """Start an engine here, and print what it took as one line of JSON."""
    import torch

    torch_seconds = time.perf_counter() - BEGIN
    from octavo import LLM

    imported = time.perf_counter()
    from octavo.engine import graphs, prompt_graphs

    split = {"rehearsing": 0.0, "recording": 0.0}

    def timed(owner: type, name: str, kind: str) -> None:
        function = getattr(owner, name)

        def call(*args: object) -> object:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                split[kind] += time.perf_counter() - begin

        setattr(owner, name, call)

    timed(graphs.DecodeGraphs, "_warm_up", "rehearsing")
    timed(graphs.DecodeGraphs, "_capture", "recording")
    timed(prompt_graphs.PromptGraphs, "warm_up", "rehearsing")
    begin = time.perf_counter()
    llm = LLM(config, load_format="dummy", skip_tokenizer_init=True, **settings)
    end = time.perf_counter()
    engine = llm.engine
    found = {
        "torch": torch_seconds,
        "octavo": imported - BEGIN - torch_seconds,
        **getattr(engine, "start_seconds", {}),
        "LLM()": end - begin,
        "all": end - BEGIN,
        **split,
        "num_kernels": getattr(engine, "num_compiled", 0),
        "tracer": "torch._dynamo" in sys.modules,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    print("PHASES " + json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--runs", default="cold,warm,warm,plain")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="a field of EngineConfig")
    parser.add_argument("--child", choices=("yes", "plain"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        if args.child == "plain":
            sys.modules["flash_attn"] = None  # type: ignore[assignment]  # importing it fails
        start(args.config, {key: json.loads(value) for key, value in (text.split("=", 1) for text in args.set)})
        return
    columns = ("torch", "octavo", *PHASES, "LLM()", "all", "rehearsing", "recording")
    print("| start | " + " | ".join(columns) + " | kernels compiled or found | torch._dynamo |")
    print("|---" * (len(columns) + 3) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for run in args.runs.split(","):
            command = [sys.executable, __file__, args.config, "--child", "plain" if run == "plain" else "yes"]
            for text in args.set:
                command += ["--set", text]
            environment = os.environ | {"TRITON_CACHE_DIR": folder}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            line = next(line for line in done.stdout.splitlines() if line.startswith("PHASES "))
            found = json.loads(line.split(" ", 1)[1])
            cells = [f"{found.get(name, 0.0):.2f}" for name in columns]
            print(f"| {run} | " + " | ".join(cells) + f" | {found['num_kernels']} | {found['tracer']} |", flush=True)


if __name__ == "__main__":
    main()
