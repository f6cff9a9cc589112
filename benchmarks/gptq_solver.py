"""How long GPTQ's solver takes for the linear layers of one block of an 8B model, by part, on a GPU or the CPU.

Hessians are of random correlated inputs, weights are random. Run it on an otherwise idle machine:

    python benchmarks/gptq_solver.py --device cuda
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from octavo.compress.gptq_solver import GPTQSettings, inverse_factor, solve
from octavo.compress.observers import choose_grid
from octavo.compress.schemes import PRESETS

GROUPS = {  # layers that read one input: inputs, outputs of each
    "q_proj, k_proj, v_proj": (4096, (4096, 1024, 1024)),
    "o_proj": (4096, (4096,)),
    "gate_proj, up_proj": (4096, (14336, 14336)),
    "down_proj": (14336, (4096,)),
}


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """The quicker of two calls."""
    best = float("inf")
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    """Parse the arguments, time, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scheme", default="W4A16", choices=list(PRESETS))
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes by this (default: 1)")
    arguments = parser.parse_args()
    device, scheme, settings = torch.device(arguments.device), PRESETS[arguments.scheme], GPTQSettings()
    torch.manual_seed(0)
    total = 0.0
    print("| layers | solve, s | of it the factor | of it the scales | relative error |\n|---|---|---|---|---|")
    for name, (columns, rows) in GROUPS.items():
        columns, rows = columns // arguments.shrink, tuple(row // arguments.shrink for row in rows)
        inputs = torch.randn(2 * columns, columns, device=device)
        inputs += inputs.roll(1, dims=1)
        hessian = inputs.t() @ inputs
        weights = [torch.randn(row, columns, device=device) for row in rows]
        order = torch.argsort(hessian.diagonal(), descending=True)
        solutions = solve(weights, hessian, scheme, settings, torch.bfloat16)
        error = sum(float(s.error.sum()) for s in solutions) / sum(float(s.norm.sum()) for s in solutions)
        whole = seconds(lambda: solve(weights, hessian, scheme, settings, torch.bfloat16), device)  # noqa: B023
        factor = seconds(lambda: inverse_factor(hessian, order, 0.01), device)  # noqa: B023
        scales = seconds(
            lambda: [
                choose_grid(weight, hessian.diagonal(), scheme, settings.observer, torch.bfloat16)  # noqa: B023
                for weight in weights  # noqa: B023
            ],
            device,
        )
        total += whole
        print(f"| {name} | {whole:.3f} | {factor:.3f} | {scales:.3f} | {error:.5f} |", flush=True)
    print(f"a block: {total:.2f} s, 32 blocks: {32 * total:.0f} s")


if __name__ == "__main__":
    main()
