"""Where the time of a decode step goes: start-up by phase, GPU and wall time by batch size, host time by part.

    python benchmarks/gpu_engine.py CONFIG_DIRECTORY [--batch 1 8 32 256] [--steps 100] [--prompt 128] [--set KEY=VALUE]
    python benchmarks/gpu_engine.py CONFIG_DIRECTORY --restarts 2      # start-up alone: a cold kernel cache, a warm one

CONFIG_DIRECTORY holds a config.json; the weights are made up, and no tokenizer is loaded. KEY=VALUE are fields of
EngineConfig. "gpu" is what the device needs for a step, "gap" how long it waits between two of them: it waits for the
host where the gap is more than a few microseconds. "host" is the time of Engine.step without the wait for tokens. A
"call" is one batch from its first request to its last token, as one LLM.generate does it.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

BEGIN = time.perf_counter()  # the imports below are part of what is measured

import torch

from octavo.core.sampling_params import SamplingParams
from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest
from octavo.engine.packing import Staging

NUM_PROFILED = 5


class Clock:
    """Adds up the time that functions of an engine take, and notes events on the device around each launch."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[tuple[Any, Any]] = []
        self._has_gpu = engine.info.device.startswith("cuda")
        scheduler, runner = engine._scheduler, engine._runner
        self._wrap(scheduler, "schedule")
        self._wrap(runner._state, "send")  # type: ignore[attr-defined]
        self._wrap(Staging, "wait")
        self._wrap(runner, "collect")
        self._wrap(scheduler, "update")
        self._wrap(engine, "step")
        self._wrap(runner, "launch", self._marked)

    def _marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self._has_gpu:
            return function

        def call(*args: Any) -> Any:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            result = function(*args)
            last.record()
            self.events.append((first, last))
            return result

        return call

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any] = lambda function: function) -> None:
        function = wrapper(getattr(owner, name))
        seconds = self.seconds

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                seconds[name] += time.perf_counter() - begin

        setattr(owner, name, timed)

    def clear(self) -> None:
        self.seconds.clear()
        self.events.clear()

    def gpu_ms(self) -> tuple[float, float]:
        """(median time of a step on the device, median gap between two steps) in ms."""
        if not self.events:
            return float("nan"), float("nan")
        torch.cuda.synchronize()
        spans = sorted(first.elapsed_time(last) for first, last in self.events)
        gaps = sorted(a[1].elapsed_time(b[0]) for a, b in zip(self.events, self.events[1:], strict=False))
        return spans[len(spans) // 2], gaps[len(gaps) // 2]


def fill(engine: Engine, batch: int, prompt: int, max_tokens: int) -> None:
    """Add `batch` requests and run until all of them decode."""
    rng = random.Random(batch)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for i in range(batch):
        ids = [rng.randrange(engine.info.vocab_size) for _ in range(prompt)]
        engine.add(EngineRequest(f"{batch}-{i}", ids, params))
    while any(request.num_output_tokens < 2 for request in engine._scheduler.states.requests.values()):
        engine.step()


def measure(engine: Engine, clock: Clock, batch: int, prompt: int, steps: int) -> None:
    """Print the times of `steps` decode steps of `batch` requests, and the parts of the host's time."""
    fill(engine, batch, prompt, steps + 40)
    for _ in range(5):
        engine.step()
    clock.clear()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    wall = (time.perf_counter() - begin) / steps * 1e3
    gpu, gap = clock.gpu_ms()
    us = {name: seconds / steps * 1e6 for name, seconds in clock.seconds.items()}
    host = us["step"] - us.get("wait", 0.0)
    parts = {
        "schedule": us["schedule"],
        "send": us["send"],
        "rest of launch": us["launch"] - us["send"],
        "collect": us["collect"] - us.get("wait", 0.0),
        "update": us["update"],
    }
    parts["rest"] = host - sum(parts.values())
    print(
        f"batch {batch:4d}: wall {wall:8.3f} ms  gpu {gpu:8.3f} ms  gap {gap * 1e3:6.1f} us  "
        f"{batch / wall * 1e3:9.0f} tok/s  host {host:7.0f} us ("
        + ", ".join(f"{k} {v:.0f}" for k, v in parts.items())
        + ")",
        flush=True,
    )


def call(engine: Engine, batch: int, prompt: int, max_tokens: int) -> None:
    """Print where the time of a whole batch goes: before its first launch, to the first tokens, steps, and after."""
    rng = random.Random(f"{batch} {time.perf_counter()}")  # no prompt is one that the prefix cache has
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompts = [[rng.randrange(engine.info.vocab_size) for _ in range(prompt)] for _ in range(batch)]
    begin = time.perf_counter()
    for i, ids in enumerate(prompts):
        engine.add(EngineRequest(f"call-{batch}-{i}", ids, params))
    added = time.perf_counter()
    engine.step()
    launched = time.perf_counter()
    times, left = [], batch
    while left:
        outputs = engine.step()
        left -= sum(output.finish_reason is not None for output in outputs)
        if outputs:
            times.append(time.perf_counter())
    engine.drain()
    end = time.perf_counter()
    gaps = sorted(b - a for a, b in itertools.pairwise(times)) or [0.0]
    ms = [1e3 * x for x in (end - begin, added - begin, launched - added, times[0] - launched, times[-1] - times[0])]
    print(
        f"call {batch} x ({prompt} + {max_tokens}): {ms[0]:.1f} ms = add {ms[1]:.2f}, launch {ms[2]:.2f}, to the first "
        f"tokens {ms[3]:.2f}, {len(gaps)} steps {ms[4]:.1f} (median {1e3 * gaps[len(gaps) // 2]:.3f}, slowest "
        f"{', '.join(f'{1e3 * gap:.2f}' for gap in gaps[:-4:-1])}), end {1e3 * (end - times[-1]):.2f}; "
        f"{batch * max_tokens / (end - begin):.0f} tok/s",
        flush=True,
    )


def restart(times: int) -> None:
    """Start the engine in processes of their own: the first one with an empty kernel cache, which the others find."""
    arguments = [word for word in sys.argv[1:] if not word.startswith("--restarts")]
    if "--restarts" in sys.argv:
        arguments.remove(str(times))
    with tempfile.TemporaryDirectory() as cache:
        for i in range(times):
            print(f"start {i + 1}, kernel cache {'warm' if i else 'cold'}", flush=True)
            command = [sys.executable, __file__, *arguments, "--start-only"]
            subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": cache}, check=True)


def profile(engine: Engine) -> None:
    """Print the kernels of a decode step of the requests that run now, those with the most time first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as result:
        for _ in range(NUM_PROFILED):
            engine.step()
        torch.cuda.synchronize()
    rows = sorted(result.key_averages(), key=lambda row: -row.self_device_time_total)
    total, count = sum(row.self_device_time_total for row in rows), sum(row.count for row in rows)
    print(f"  {count / NUM_PROFILED:.0f} kernels and copies a step, {total / NUM_PROFILED:.0f} us together", flush=True)
    for row in rows[:14]:
        time_us, calls = row.self_device_time_total / NUM_PROFILED, row.count / NUM_PROFILED
        print(f"  {time_us:9.1f} us  {calls:6.1f} x  {row.key[:110]}", flush=True)


def abort_all(engine: Engine) -> None:
    for name in list(engine._requests):
        engine.abort(name)
    engine.drain()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="directory with a config.json")
    parser.add_argument("--set", nargs="+", metavar="KEY=VALUE", help="fields of EngineConfig", default=[])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--profile", type=int, nargs="*", default=[1, 256], help="batch sizes whose kernels are listed")
    parser.add_argument("--calls", nargs="*", default=["1x32+256", "8x512+256"], help="batches timed whole, twice each")
    parser.add_argument("--restarts", type=int, default=0, help="only start, this often, and tell the phases")
    parser.add_argument("--start-only", action="store_true", help="end after the start")
    return parser.parse_args()


def settings_of(pairs: list[str]) -> dict[str, Any]:
    """Values as Python literals where they are numbers or True and False, else as text."""
    literals: dict[str, Any] = {"True": True, "False": False, "None": None}
    found: dict[str, Any] = {}
    for pair in pairs:
        key, value = pair.split("=", 1)
        number = value.replace(".", "", 1).isdigit()
        found[key] = (
            literals[value]
            if value in literals
            else (float(value) if "." in value else int(value))
            if number
            else value
        )
    return found


def main() -> None:
    args = parse()
    if args.restarts:
        restart(args.restarts)
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(f"START import {time.perf_counter() - BEGIN:.2f} s", flush=True)
    settings = {"load_format": "dummy", "skip_tokenizer_init": True} | settings_of(args.set)
    engine = Engine(EngineConfig(model=args.config, **settings))
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in engine.start_seconds.items())
    total = time.perf_counter() - BEGIN
    print(
        f"START {phases}; engine {engine.info.load_seconds:.2f} s, all {total:.2f} s; {engine.num_compiled} kernels",
        flush=True,
    )
    if args.start_only:
        return
    print(engine.info.describe_capacity(), flush=True)
    for text in args.calls:
        batch, prompt, max_tokens = (int(number) for number in text.replace("x", "+").split("+"))
        for _ in range(2):
            call(engine, batch, prompt, max_tokens)
    with torch.inference_mode():
        clock = Clock(engine)
    for batch in args.batch:
        measure(engine, clock, batch, args.prompt, args.steps)
        if batch in args.profile and engine.info.device.startswith("cuda"):
            profile(engine)
        abort_all(engine)
    print(f"done after {time.perf_counter() - BEGIN:.1f} s", flush=True)


if __name__ == "__main__":
    main()
