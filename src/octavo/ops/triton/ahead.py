"""Compiling every kernel that some calls would launch, side by side, before the first of them runs.

A kernel is compiled when it is first launched, one after another, each for most of a second. Here launches only ask
for their kernel, and threads compile what was asked for: most of the work is LLVM's and ptxas', outside of the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from triton.runtime import cache
from triton.runtime.jit import JITFunction

try:
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:  # a release of triton without it: kernels are compiled when they are first launched
    AsyncCompileMode = None

_MOST_THREADS = 32


def hash_compiler() -> None:
    """Have Triton's hash of its own files made, 0.3 s, which is part of the name of every compiled kernel.

    It is kept for the process, and most of it runs outside of the GIL.
    """
    getattr(cache, "triton_key", str)()  # some releases keep it elsewhere: then it is made when it is needed


def compile_ahead(launch: Callable[[], object]) -> int:
    """As `octavo.ops.compile_ahead`."""
    if AsyncCompileMode is None:
        return 0
    run, compile_one = JITFunction.run, JITFunction._do_compile

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def compile_once(self: Any, key: Any, signature: Any, device: Any, *rest: Any) -> Any:
        kernel = compile_one(self, key, signature, device, *rest)
        self.device_caches[device][0].setdefault(key, kernel)  # a later launch finds what is being compiled
        return kernel

    # An error of the compiler is raised again by the launch that needs the kernel, with its place in the program.
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True) as mode:
        JITFunction.run, JITFunction._do_compile = only_compile, compile_once
        try:
            launch()
        finally:
            JITFunction.run, JITFunction._do_compile = run, compile_one
    return len(mode.future_kernels)
