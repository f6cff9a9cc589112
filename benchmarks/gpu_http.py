"""The server under open-loop loads past what the device sustains, and one request five seconds after each.

    python benchmarks/gpu_http.py LOAD_SCRIPT MODEL [--rates 32,48,64] [--seconds 15] [--json FILE] [-- FLAG ...]

LOAD_SCRIPT takes --url, --model, --rates, --seconds, --prompt, --output, --vocab and --label, and prints a line
"LOAD label {...}" a rate. The flags after "--" go to `octavo serve`. An overload must leave nothing behind: the single
request, of the load's length, tells its time to the first token, which is to be below --limit milliseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import httpx

from octavo.decide.server_process import ServerProcess

PAUSE_SECONDS = 5.0


def load(script: Path, url: str, model: str, rate: str, args: argparse.Namespace) -> dict[str, object]:
    """Run the load script at one rate; returns what it printed."""
    command = [sys.executable, str(script), "--url", url, "--model", model, "--label", "http", "--rates", rate]
    for name in ("seconds", "prompt", "output", "vocab"):
        command += [f"--{name}", f"{getattr(args, name):g}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOAD "))
    return dict(json.loads(line.split(" ", 2)[2]))


def first_token_ms(url: str, model: str, args: argparse.Namespace) -> float:
    """Milliseconds from sending one streamed request to its first chunk."""
    draw = random.Random(f"after/{time.time()}")
    ids = [draw.randrange(100, args.vocab) for _ in range(args.prompt)]
    body = {"model": model, "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.Client(timeout=60.0) as client:
        client.get(f"{url}/health")  # the connection is there, as a client's that sent requests before
        begin = time.perf_counter()
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"the server answered {response.status_code}: {response.read()[:300]!r}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    return 1e3 * (time.perf_counter() - begin)
    raise SystemExit("the request after the load got no token")


def main() -> None:
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("model")
    parser.add_argument("--rates", default="32,48,64")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=40_000)
    parser.add_argument("--limit", type=float, default=100.0, help="milliseconds of the request after a load")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(own)
    results = []
    with ServerProcess(args.model, flags) as server:
        name = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        print(f"server ready in {server.start_seconds:.1f} s")
        print("| rate | output tok/s | TTFT p50/p99 ms | TPOT p50/p99 ms | gap p50/p99 ms | met | errors | after, ms |")
        print("|---" * 8 + "|")
        for rate in args.rates.split(","):
            entry = load(args.script, server.url, name, rate, args)
            time.sleep(PAUSE_SECONDS)
            entry["after_ms"] = after = first_token_ms(server.url, name, args)
            times = [f"{entry[key]['50']} / {entry[key]['99']}" for key in ("ttft_ms", "tpot_ms", "itl_ms")]  # type: ignore[index]
            cells = [rate, entry["out_tok_s"], *times, entry["slo_met"], entry["errors"], f"{after:.1f}"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            results.append(entry)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    late = [entry["after_ms"] for entry in results if float(entry["after_ms"]) > args.limit]  # type: ignore[arg-type]
    if late:
        raise SystemExit(f"the request after a load took {late} ms; the limit is {args.limit:g}")


if __name__ == "__main__":
    main()
