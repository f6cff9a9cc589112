"""Runs the comparison with LLM Compressor: models x recipes x draws x tools, several processes at once.

    python benchmarks/compression_grid.py --model demo=DIR:demo.npz --model gemma=DIR:gemma.npz \\
        --results results.jsonl --octavo-workers 6 --peer-workers 8 --peer-python PEER/bin/python --minutes 9

A model is NAME=CHECKPOINT:PREPARED, the last written by `compression_accuracy.py prepare`. Every finished job is one
line of the results file; a job that is there (without an error) is not run again, so the same command goes on after an
interruption. No job is begun after --minutes, and those under way are ended a little later. Workers share the GPUs that
there are, by NVIDIA's multi-process service where it is installed; each has --threads CPU threads. Seconds in the
results are of a busy machine: not for publication.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

from compression_recipes import KEY, OPPONENTS, RECIPES, parse
from mps import multi_process_service

GRACE = 45.0  # seconds for jobs under way once the time is up
COST = {"awq": 3, "gptq": 2, "w8a8": 2}  # longer ones first, so that none is left over at the end


def jobs(models: dict[str, tuple[str, str]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """All jobs, the first draw's before the second's, long ones first; a recipe without data is run once."""
    found = []
    for name, (directory, data) in models.items():
        wanted = [("octavo", "none", 0)]
        for tool in args.tools:
            for recipe, draws in RECIPES[tool].items():
                if not args.recipes or recipe in args.recipes:
                    wanted += [(tool, recipe, draw) for draw in range(min(args.draws, draws) or 1)]
        for tool, recipe, draw in wanted:
            job: dict[str, Any] = {"tool": tool, "model": name, "recipe": recipe, "draw": draw}
            job |= {"directory": directory, "data": data, "limit": args.limit, "tasks": draw < args.task_draws}
            found.append(job)
    return sorted(found, key=lambda job: (job["draw"], -_cost(job["recipe"])))


def _cost(recipe: str) -> int:
    return 9 if recipe == "none" else COST.get(parse(recipe)[0].partition("-")[0], 0)


def key(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What tells jobs and results apart."""
    return tuple(entry[name] for name in KEY)


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file that hold a score; of several for one job the last. A torn last line is left out."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "error" not in entry:
                found[key(entry)] = entry
    return list(found.values())


class Grid:
    """Hands jobs to worker processes and writes what they answer."""

    def __init__(
        self, todo: list[dict[str, Any]], args: argparse.Namespace, scratch: Path, sharing: dict[str, str]
    ) -> None:
        self.queues = {tool: deque(job for job in todo if job["tool"] == tool) for tool in RECIPES}
        self.total, self.done, self.failed = len(todo), 0, 0
        self.args, self.scratch, self.sharing = args, scratch, sharing
        self.lock = threading.Lock()
        self.ends = time.monotonic() + args.minutes * 60
        self.running: set[subprocess.Popen[str]] = set()

    def run(self) -> None:
        """Until all is done or the time is up."""
        tools = ["octavo"] * self.args.octavo_workers + ["peer"] * self.args.peer_workers
        slots = [threading.Thread(target=self._slot, args=(number, tool)) for number, tool in enumerate(tools)]
        for slot in slots:
            slot.start()
        for slot in slots:
            slot.join(max(0.0, self.ends + GRACE - time.monotonic()))
        with self.lock:
            late = list(self.running)
        for process in late:
            process.kill()
        for slot in slots:
            slot.join()

    def _slot(self, number: int, tool: str) -> None:
        """One worker at a time: for its own tool's jobs, then for what the other tool has left."""
        for kind in (tool, "peer" if tool == "octavo" else "octavo"):
            worker: subprocess.Popen[str] | None = None
            while (job := self._next(kind)) is not None:
                if worker is None or worker.poll() is not None:
                    worker = self._start(kind, number)
                self._write(self._ask(worker, job))
            if worker is not None:
                self._stop(worker)

    def _next(self, tool: str) -> dict[str, Any] | None:
        with self.lock:
            if time.monotonic() > self.ends or not self.queues[tool]:
                return None
            return self.queues[tool].popleft()

    def _start(self, tool: str, number: int) -> subprocess.Popen[str]:
        environment = os.environ | self.sharing
        environment |= {
            "OMP_NUM_THREADS": str(self.args.threads),
            "MKL_NUM_THREADS": str(self.args.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [*self._paths(tool), os.environ.get("PYTHONPATH")])),
        }
        if self.args.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(number % self.args.gpus)
        python = self.args.peer_python if tool == "peer" else sys.executable
        command = [python, str(Path(__file__).with_name("compression_worker.py")), str(self.scratch)]
        log: IO[str] = (self.args.logs / f"{tool}-{number}.log").open("a")
        with log, self.lock:
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
            self.running.add(worker)
        return worker

    def _paths(self, tool: str) -> list[str]:
        """Octavo's sources for both; the peer's packages for the peer."""
        source = str(Path(__file__).parents[1] / "src")
        return [source, self.args.peer_path] if tool == "peer" and self.args.peer_path else [source]

    def _ask(self, worker: subprocess.Popen[str], job: dict[str, Any]) -> dict[str, Any]:
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        code = worker.wait()
        return {name: job[name] for name in KEY} | {"error": f"the worker ended with {code}; see its log"}

    def _stop(self, worker: subprocess.Popen[str]) -> None:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
        with self.lock:
            self.running.discard(worker)

    def _write(self, result: dict[str, Any]) -> None:
        with self.lock:
            self.done += 1
            self.failed += "error" in result
            with self.args.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result, separators=(",", ":")) + "\n")
            print(f"{self.done}/{self.total}", *key(result), _summary(result), flush=True)


def _summary(result: dict[str, Any]) -> str:
    if "error" in result:
        return "ERROR " + result["error"].strip().splitlines()[-1]
    nll = sum(result["windows"]) / len(result["windows"])
    return f"nll {nll:.4f}, {result.get('seconds', 0):.0f} + {result['scoring_seconds']:.0f} s"


def main() -> None:
    """Parse the arguments and run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=CHECKPOINT:PREPARED")
    parser.add_argument("--results", required=True, type=Path)
    parser.add_argument("--tools", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--recipes", nargs="*", default=[], help=f"default: all, {', '.join(OPPONENTS)} and the peer's")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--task-draws", type=int, default=1, help="draws that are scored on tasks too (default: 1)")
    parser.add_argument("--limit", type=int, help="score that many windows, and ten times as many items a task")
    parser.add_argument("--octavo-workers", type=int, default=1)
    parser.add_argument("--peer-workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads a worker (default: 1)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to spread the workers over (default: as they are)")
    parser.add_argument("--peer-python", default=sys.executable, help="Python that imports llmcompressor")
    parser.add_argument("--peer-path", help="folder of packages that only the peer's workers get")
    parser.add_argument("--minutes", type=float, default=600.0)
    args = parser.parse_args()
    models = {}
    for model in args.model:
        name, _, paths = model.partition("=")
        directory, _, data = paths.rpartition(":")
        models[name] = (directory, data)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.logs = args.results.parent / "logs"
    args.logs.mkdir(exist_ok=True)
    finished = {key(entry) for entry in read_results(args.results)}
    todo = [job for job in jobs(models, args) if key(job) not in finished]
    print(f"{len(todo)} jobs, {len(finished)} results already there", flush=True)
    with tempfile.TemporaryDirectory() as scratch, multi_process_service() as sharing:
        grid = Grid(todo, args, Path(scratch), sharing)
        grid.run()
    print(f"{grid.done} of {grid.total} jobs done, {grid.failed} with an error", flush=True)


if __name__ == "__main__":
    main()
