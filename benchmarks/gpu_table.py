"""One column of the GPU table: write the checkpoint, time every workload, and set the figures beside the limit.

    python benchmarks/gpu_table.py --throughput offline_throughput.py --config CONFIG_DIR --scheme bf16
    python benchmarks/gpu_table.py --throughput offline_throughput.py --config CONFIG_DIR --scheme w4a16 \
        --writer make_checkpoint.py --weights /local/disk --out results [--only bs1,bs8]

The timing script takes --engine, --model, --kwargs, --vocab, --probe, --label, --json and --only; the writer takes
CONFIG_DIR OUT_DIR --scheme --seed --device. A bf16 column runs dummy weights. Quantized ones are written once, before
the timing, where --weights says. Results: OUT/LABEL.jsonl, OUT/LABEL.probe.json and the timing script's own lines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent
ENGINE_KWARGS = {"skip_tokenizer_init": True, "max_model_len": 32768, "gpu_memory_utilization": 0.9, "seed": 0}


def run(command: list[str]) -> None:
    """Run and show a command; its failure ends this script with its status."""
    print("+ " + " ".join(command), flush=True)
    done = subprocess.run(command)
    if done.returncode:
        raise SystemExit(done.returncode)


def write_checkpoint(args: argparse.Namespace) -> Path:
    """The seeded checkpoint's folder; written unless its last file is there."""
    folder = args.weights / f"{args.config.name}-{args.scheme}-{args.device}-0"
    if not (folder / "config.json").is_file():
        if args.writer is None:
            raise SystemExit(f"{folder} is not there; --writer names the script that writes it")
        command = [sys.executable, str(args.writer), str(args.config), str(folder), "--scheme", args.scheme]
        run([*command, "--seed", "0", "--device", args.device])
    return folder


def probe_difference(ours: Path, other: Path) -> float:
    """Mean absolute difference of two probes' log-probabilities."""
    a, b = ([x for row in json.loads(path.read_text()) for x in row] for path in (ours, other))
    if len(a) != len(b):
        raise SystemExit(f"{ours} has {len(a)} tokens and {other} {len(b)}")
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--throughput", type=Path, required=True, help="the timing script")
    parser.add_argument("--config", type=Path, required=True, help="directory with config.json")
    parser.add_argument("--scheme", choices=("bf16", "fp8", "w4a16", "w8a8"), default="bf16")
    parser.add_argument("--writer", type=Path, help="the script that writes a seeded checkpoint")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="where checkpoints are kept")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--engine", default="octavo")
    parser.add_argument("--kwargs", default="{}", help="JSON, added to the engine's arguments")
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--only", default="")
    parser.add_argument("--set", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where the writer draws")
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--baseline-label")
    parser.add_argument("--baseline-probe", type=Path)
    parser.add_argument("--targets", help="roofline.py's column of targets")
    args = parser.parse_args()

    label = f"{args.engine}-{args.config.name}-{args.scheme}"
    args.out.mkdir(parents=True, exist_ok=True)
    results, probe = args.out / f"{label}.jsonl", args.out / f"{label}.probe.json"
    kwargs = {**ENGINE_KWARGS, **json.loads(args.kwargs)}
    model = args.config
    if args.scheme == "bf16":
        kwargs["load_format"] = "dummy"
    else:
        model = write_checkpoint(args)
    timing = [sys.executable, str(args.throughput), "--engine", args.engine, "--model", str(model), "--set", args.set]
    timing += ["--kwargs", json.dumps(kwargs), "--vocab", str(args.vocab), "--label", label]
    run([*timing, "--probe", str(probe), "--json", str(results), "--only", args.only])
    if args.baseline_probe:
        print(f"PROBE mean absolute difference {probe_difference(probe, args.baseline_probe):.4f}", flush=True)
    report = [sys.executable, str(BENCHMARKS / "roofline.py"), str(args.config), "--scheme", args.scheme]
    report += ["--measured", str(results)]
    for name in ("baseline", "baseline_label", "targets"):
        if getattr(args, name):
            report += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    run(report)


if __name__ == "__main__":
    main()
