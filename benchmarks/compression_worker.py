"""Compresses and scores: one job a line of standard input, one result a line of standard output, both JSON.

`compression_grid.py` starts it, once in Octavo's environment and once in LLM Compressor's, so that each tool imports
its own libraries once. Both read the result with Octavo's reader, which has to be importable in both.

Job: {"tool", "model", "recipe", "draw", "directory", "data", "limit", "tasks"}. Result: the job's key,
"seconds" to compress, "bytes" of all tensors and of the files, and what compression_accuracy.score gives; or "error".
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compression_accuracy import Scorer, score
from compression_recipes import KEY, OCTAVO_RECIPES, octavo_recipe


def compress_octavo(model: str, recipe: str, windows: np.ndarray, output_dir: Path, device: str) -> float:
    """Write the checkpoint by `octavo.oneshot`; seconds that it took."""
    from octavo import oneshot

    data: dict[str, Any] = {}
    if OCTAVO_RECIPES[recipe]:
        data = {
            "dataset": windows.tolist(), "num_calibration_samples": len(windows), "max_seq_length": windows.shape[1],
        }  # fmt: skip
    started = time.perf_counter()
    oneshot(model, recipe=octavo_recipe(recipe), output_dir=output_dir, device=device, **data)
    return time.perf_counter() - started


def sizes(directory: Path) -> dict[str, int]:
    """Bytes of the tensors alone, and of the safetensors files with their headers."""
    files = list(directory.glob("*.safetensors"))
    whole = sum(file.stat().st_size for file in files)
    headers = 0
    for file in files:
        with file.open("rb") as opened:
            headers += 8 + int.from_bytes(opened.read(8), "little")
    return {"tensors": whole - headers, "files": whole}


class Worker:
    """Keeps a model to score with for each checkpoint directory that it has met."""

    def __init__(self, scratch: Path) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.scratch = scratch
        self.scorers: dict[str, Scorer] = {}

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Compress (recipe "none": do not), score, and delete what was written."""
        result: dict[str, Any] = {name: job[name] for name in KEY}
        output = Path(tempfile.mkdtemp(dir=self.scratch)) / "out"
        data = np.load(job["data"])
        try:
            checkpoint = Path(job["directory"])
            if job["recipe"] != "none":
                checkpoint = output
                result["seconds"] = round(self._compress(job, data["calibration"][job["draw"]], output), 2)
            result["bytes"] = sizes(checkpoint)
            started = time.perf_counter()
            scorer = self._scorer(job["directory"])
            scorer.load(checkpoint)
            result |= score(scorer, data, job["limit"], job["tasks"])
            result["scoring_seconds"] = round(time.perf_counter() - started, 2)
        except Exception:  # the grid goes on; the result says what went wrong
            result["error"] = traceback.format_exc()[-2000:]
        finally:
            shutil.rmtree(output.parent)
            if self.device == "cuda":
                torch.cuda.empty_cache()
        return result

    def _compress(self, job: dict[str, Any], windows: np.ndarray, output: Path) -> float:
        if job["tool"] == "octavo":
            return compress_octavo(job["directory"], job["recipe"], windows, output, self.device)
        from compression_peer import compress

        return compress(job["directory"], job["recipe"], windows, output, batch_size=8 if self.device == "cuda" else 1)

    def _scorer(self, directory: str) -> Scorer:
        if directory not in self.scorers:
            self.scorers[directory] = Scorer(directory, self.device)
        return self.scorers[directory]


def main() -> None:
    """Serve jobs until standard input ends. Whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    worker = Worker(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(worker.run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
