"""Which kernels the time of a whole workload goes to, and how long the device waits.

    python benchmarks/gpu_profile.py CONFIG_DIRECTORY [--set quantization=fp8] [--workload 256x512+256 mix256]

CONFIG_DIRECTORY holds a config.json; the weights are made up. A workload is REQUESTSxPROMPT+OUTPUT tokens, or mixN: N
requests with prompts and outputs of 100 to 1,024 tokens; REQUESTSxPROMPT+OUTPUT/SHARED has SHARED tokens of the prompts
in common. Each runs once without the profiler and once with it: "idle" is the part of the profiled time in which no
kernel ran, and the percentages are of that time.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import defaultdict
from typing import Any

import torch
from gpu_engine import settings_of
from torch.profiler import ProfilerActivity, profile

from octavo import LLM, SamplingParams

WORKLOAD = re.compile(r"(\d+)x(\d+)\+(\d+)(?:/(\d+))?")


def requests(workload: str, repeat: int, vocab: int) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts of random ids and their parameters; another repeat has other ids."""
    rng = random.Random(f"{workload} {repeat}")
    shared = 0
    if workload.startswith("mix"):
        sizes = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(int(workload[3:]))]
    else:
        match = WORKLOAD.fullmatch(workload)
        if not match:
            raise SystemExit(f"--workload {workload}: expected REQUESTSxPROMPT+OUTPUT[/SHARED] or mixN")
        count, prompt, output, shared = (int(number or 0) for number in match.groups())
        sizes = [(prompt, output)] * count
    prefix = [rng.randrange(100, vocab) for _ in range(shared)]
    prompts = [
        {"prompt_token_ids": prefix + [rng.randrange(100, vocab) for _ in range(size - shared)]} for size, _ in sizes
    ]
    parameters = [
        SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False) for _, output in sizes
    ]
    return prompts, parameters


def kernels(result: profile) -> list[tuple[str, float, float]]:
    """(name, start, end) in us of what ran on the device, by start; parsing the events takes ten times as long."""
    assert result.profiler is not None and result.profiler.kineto_results is not None
    events = [e for e in result.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    spans = [(e.name(), e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3) for e in events]
    return sorted(spans, key=lambda span: span[1])


def show(workload: str, plain: float, spans: list[tuple[str, float, float]], top: int) -> None:
    """Print the kernels with the most time, and when none ran."""
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    busy, end = 0.0, spans[0][1]
    gaps = []  # (length, when), in us
    for name, first, last in spans:
        gaps.append((first - end, first - spans[0][1]))
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
        times[name] += last - first
        calls[name] += 1
    whole = end - spans[0][1]
    print(
        f"{workload}: {plain:.3f} s; profiled {whole / 1e6:.3f} s, idle {100 * (1 - busy / whole):.1f} %, "
        f"{len(spans)} kernels and copies",
        flush=True,
    )
    longest = ", ".join(f"{us / 1e3:.1f} ms at {when / 1e6:.2f} s" for us, when in sorted(gaps, reverse=True)[:8])
    for shortest in (3, 20, 100):
        some = [us for us, _ in gaps if us > shortest]
        print(f"  {len(some)} gaps over {shortest} us: {sum(some) / 1e3:.1f} ms", end="", flush=True)
    print(f"; the longest {longest}", flush=True)
    for name, us in sorted(times.items(), key=lambda item: -item[1])[:top]:
        row = f"{100 * us / whole:5.1f} %  {us / 1e3:9.1f} ms  {calls[name]:6d} x {us / calls[name]:8.1f} us"
        print(f"  {row}  {name[:90]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="directory with a config.json")
    parser.add_argument("--set", nargs="+", metavar="KEY=VALUE", default=[], help="fields of EngineConfig")
    parser.add_argument("--workload", nargs="+", default=["256x512+256", "mix256"])
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--top", type=int, default=14)
    args = parser.parse_args()
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 32768} | settings_of(args.set)
    llm = LLM(args.config, **settings)
    llm.generate(*requests("16x64+8", 0, args.vocab), use_tqdm=False)
    for workload in args.workload:
        begin = time.perf_counter()
        llm.generate(*requests(workload, 0, args.vocab), use_tqdm=False)
        plain = time.perf_counter() - begin
        prompts, parameters = requests(workload, 1, args.vocab)
        with profile(activities=[ProfilerActivity.CUDA]) as result:
            llm.generate(prompts, parameters, use_tqdm=False)
            torch.cuda.synchronize()
        show(workload, plain, kernels(result), args.top)


if __name__ == "__main__":
    main()
