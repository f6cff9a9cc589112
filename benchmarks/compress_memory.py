"""The memory that a compression takes, measured from outside, beside what the command said that it would take.

    python benchmarks/compress_memory.py FOLDER [--layers 2] [--samples 64] [--length 2048] [--keep] [-- FLAGS]

Makes up a Llama of the 8B shape with fewer blocks in FOLDER (3 GB with two: what is held at once does not depend on
their number), and runs `octavo compress` on it, with random tokens and the FLAGS of that command. Every 20 ms
/proc/PID/status of the command is read (Linux). What is mapped from files (libraries, the checkpoint) is told apart
from what the process holds alone: only that has to fit. The files are removed at the end, unless --keep.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpu_compress import make_checkpoint, random_samples

LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
PARTS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")


def status(pid: int) -> dict[str, int]:
    """Bytes by kind of a process; {} when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {part: int(fields[part].split()[0]) * 1024 for part in PARTS if part in fields}


def watch(process: subprocess.Popen[bytes]) -> tuple[dict[str, int], dict[str, int]]:
    """The largest of each kind until the process ends, and all kinds at the fullest moment that was seen."""
    most, fullest = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    while process.poll() is None:
        now = status(process.pid)
        most = {part: max(most[part], now.get(part, 0)) for part in PARTS}
        if now.get("VmRSS", 0) > fullest["VmRSS"]:
            fullest = now
        time.sleep(0.02)
    return most, fullest


def prepare(folder: Path, layers: int, samples: int, length: int) -> None:
    """The checkpoint and its calibration data, unless they are there."""
    model, tokens = folder / "model", folder / f"tokens-{samples}-{length}.jsonl"
    config = LLAMA_8B | {"num_hidden_layers": layers}
    if not (model / "config.json").exists():
        model.mkdir(parents=True)
        print(f"{make_checkpoint(config, model, torch.device('cpu')) / 1e9:.2f} GB made up", flush=True)
    rows = random_samples(LLAMA_8B["vocab_size"], samples, length)  # type: ignore[arg-type]
    tokens.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("layers", 2), ("samples", 64), ("length", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    prepare(given.folder, given.layers, given.samples, given.length)
    output = given.folder / "compressed"
    shutil.rmtree(output, ignore_errors=True)
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "compress", str(given.folder / "model"), "--output-dir", str(output),
         "--calibration-file", str(given.folder / f"tokens-{given.samples}-{given.length}.jsonl"),
         "--num-calibration-samples", str(given.samples), "--max-seq-length", str(given.length), *given.flags]
    )  # fmt: skip
    most, fullest = watch(process)
    seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"the command ended with {process.returncode}")
    report = json.loads((output / "compression_report.json").read_text())
    estimated = sum(report["estimate"]["host"].values())
    print(f"{seconds:.0f} s; {json.dumps(report['seconds'])}")
    print(f"estimate {estimated / 1e9:.2f} GB; {json.dumps(report['estimate']['host'])}")
    print(f"peak     {most['VmHWM'] / 1e9:.2f} GB as the kernel counts, {most['RssAnon'] / 1e9:.2f} GB of it alone")
    print("at the fullest moment seen " + ", ".join(f"{part} {size / 1e9:.2f} GB" for part, size in fullest.items()))
    if not given.keep:
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
