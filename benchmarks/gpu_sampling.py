"""The sampling kernels on a GPU: checked against their definition, then timed in a CUDA graph.

    python benchmarks/gpu_sampling.py            on a GPU
    python benchmarks/gpu_sampling.py --compile  anywhere: compiles the kernels for compute capability 9.0

Microseconds a call by number of rows, for the vocabularies of Qwen3 and Llama 3. "read" is what reading the logits
once takes at 4.3 TB/s; they come from the level-2 cache where they fit into it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.ops import sampling as definition
from octavo.ops.triton import sampling

ROWS = (1, 8, 32, 256)
VOCABULARIES = (128_256, 151_936)
KINDS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "flat, top-p 0.99": {"top_p": 0.99, "temperature": 4.0},
}


def compile_kernels() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    columns = {"temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32", "seeds": "*i64"}
    shape = {"row_stride": "i32", "vocab": "i32", "num_splits": "i32"}
    buffers = {"positions": "*i64", "out": "*i64", "values": "*fp32", "indices": "*i32"}
    for kind in ("*fp32", "*bf16"):
        splits = {"SPLITS": 64}
        jobs = [
            (sampling.split_max_kernel, {"logits": kind, "partial": "*i64", **shape}, {"SPLIT": sampling.SPLIT}, 8),
            (sampling.argmax_kernel, {"partial": "*i64", "out": "*i64", "num_splits": "i32"}, splits, 1),
            (
                sampling.sample_kernel,
                {"logits": kind, "partial": "*i64", **columns, **buffers, **shape},
                {**splits, "TILE": sampling.TILE, "CAPACITY": sampling.CAPACITY},
                16,
            ),
        ]
        for kernel, signature, constants, warps in jobs:
            names = kernel.arg_names
            source = ASTSource(
                fn=kernel,
                signature={**signature, **dict.fromkeys(constants, "constexpr")},
                constexprs={(names.index(name),): value for name, value in constants.items()},
                attrs={
                    (names.index(name),): [["tt.divisibility", 16]]
                    for name, type_name in signature.items()
                    if type_name.startswith("*") or name in ("row_stride", "vocab")
                },
            )
            options = {"num_warps": warps}
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            wide = compiled.asm["ptx"].count(".v4")
            print(f"{kernel.__name__} {kind}: {compiled.metadata.shared} bytes shared, {wide} wide accesses")


def parameters(rows: int, settings: dict[str, float], device: torch.device) -> list[Tensor]:
    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), settings.get(name, default), dtype=dtype, device=device)

    index = torch.arange(rows, device=device)
    return [
        column("temperature", 1.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        index * 7919,
        index,
    ]


def microseconds(function: Callable[[], Tensor], repeats: int = 20) -> float:
    """Of a call within a CUDA graph of `repeats` calls."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    if parser.parse_args().compile:
        return compile_kernels()
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| vocabulary | rows | read | argmax | torch.argmax | " + " | ".join(KINDS) + " | agree |")
    print("|---" * (6 + len(KINDS)) + "|")
    for vocab in VOCABULARIES:
        for rows in ROWS:
            torch.manual_seed(0)
            logits = torch.randn(rows, vocab, device=device) * 3
            cells, agree, total = [], 0, 0
            cells.append(microseconds(lambda x=logits: sampling.argmax(x)))
            cells.append(microseconds(lambda x=logits: x.argmax(dim=-1)))
            for settings in KINDS.values():
                params = parameters(rows, settings, device)
                chosen = sampling.sample_tokens(logits, *params)
                agree += int((chosen == definition.sample_tokens(logits, *params)).sum())
                total += rows
                cells.append(microseconds(lambda x=logits, p=params: sampling.sample_tokens(x, *p)))
            read = logits.numel() * 4 / 4.3e6
            numbers = " | ".join(f"{cell:.1f}" for cell in cells)
            print(f"| {vocab} | {rows} | {read:.1f} | {numbers} | {agree} of {total} |", flush=True)


if __name__ == "__main__":
    main()
