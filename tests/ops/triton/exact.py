"""Casts and products of the interpreter as a GPU does them, for tests that look at single bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.ops.triton import runtime


@pytest.fixture
def exact_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter cuts float32 off to bfloat16, and rounds to float8 without carrying to the exponent."""
    if not runtime.is_native():
        import triton.language as tl
        from triton.runtime import interpreter

        narrow = {tl.bfloat16: (torch.bfloat16, torch.int16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}
        original = interpreter._convert_float

        def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
            if source != tl.float32 or target not in narrow:
                return original(values, source, target, rounding)
            dtype, bits = narrow[target]
            rounded = torch.from_numpy(values.copy()).to(dtype).view(bits).numpy()
            return rounded.view(f"uint{target.primitive_bitwidth}")

        monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a product has the same bits among any rows, as in matrix units.

    The interpreter multiplies by numpy, whose order of summation follows from the shapes and the CPU: in float64 that
    does not show once a sum is rounded.
    """
    if not runtime.is_native():
        import triton.language as tl
        from triton.runtime import interpreter

        original = interpreter.InterpreterBuilder.create_dot

        def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
            if d.data.dtype != np.float32:
                return original(self, a, b, d, *options)
            zeros = interpreter.TensorHandle(np.zeros(d.data.shape, np.float64), tl.float64)
            product = original(self, a, b, zeros, *options).data.astype(np.float32)
            return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
