"""Kernels compiled ahead of their launch: each once, none run. In a process of its own, which compiles in earnest."""

from __future__ import annotations

from pathlib import Path

from absent_gpu import run_without_gpu

SCRIPT = """
from octavo.ops.triton import ahead, inputs

words = torch.zeros(8, dtype=torch.int32)

def launch():
    for count in (1, 5, 16):  # one kernel: the count is not specialized on
        inputs._write_state[(1,)](words, words, words, count, PART=64)
    inputs._write_state[(1,)](words, words, words, 3, PART=128)

def fail():
    launch()
    raise KeyError("the model's own")

print(ahead.compile_ahead(launch), ahead.compile_ahead(launch), words.tolist())
try:
    ahead.compile_ahead(fail)
except KeyError:
    print(sorted(type(kernel).__name__ for kernel in inputs._write_state.device_caches[0][0].values()))
assert inputs._write_state.run.__func__.__module__ == "triton.runtime.jit"
"""


def test_kernels_are_compiled_once_and_not_run(tmp_path: Path) -> None:
    expected = ["2 0 [0, 0, 0, 0, 0, 0, 0, 0]", "['CompiledKernel', 'CompiledKernel']"]
    assert run_without_gpu(SCRIPT, tmp_path) == expected


def test_the_compiler_is_hashed_once(tmp_path: Path) -> None:
    script = """
from triton.runtime import cache
from octavo.ops.triton import ahead

assert cache.triton_key.cache_info().currsize == 0
ahead.hash_compiler()
print(cache.triton_key.cache_info().currsize)
"""
    assert run_without_gpu(script, tmp_path) == ["1"]
