"""Models that are quantized already: which are taken, and what the report says about them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.checkpoint.reader import Checkpoint
from octavo.errors import UnsupportedModelError

_ENOUGH = 8  # bits: what is lost at that width is small beside what compression adds


def origin_note(checkpoint: Checkpoint, linears: Iterable[str]) -> str | None:
    """What to say of a checkpoint whose linear layers (full names) are stored quantized; None for a plain one.

    GGUF, 8 bits and MXFP4 are forms that models are published in, so they are dequantized. Integers of fewer bits are
    refused: there is an original of them, and rounding twice costs accuracy that nobody would look for here.
    """
    bits = {found for name in linears if (found := checkpoint.stored_bits(name)) is not None}
    if not bits:
        return None
    widths = " and ".join(f"{width}-bit" for width in sorted(bits))
    if checkpoint.path.is_file():
        return f"{checkpoint.path.name} holds {widths} weights, which were dequantized before they were compressed"
    method = (checkpoint.config.get("quantization_config") or {}).get("quant_method", "another tool's file")
    if min(bits) < _ENOUGH and method != "mxfp4":
        raise UnsupportedModelError(
            f"{checkpoint.path} is quantized already ({method}, {widths} weights); compressed again, it would "
            "carry the errors of both. Give the original model, or make a plain one of it with `octavo convert`"
        )
    return f"{checkpoint.path} holds {widths} weights ({method}), which were dequantized before they were compressed"


def refuse_quantized(model: Any) -> None:
    """UnsupportedModelError for a loaded model whose weights are not plain."""
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None:
        method = getattr(quantization, "quant_method", None) or (
            quantization.get("quant_method") if isinstance(quantization, dict) else None
        )
        raise UnsupportedModelError(
            f"{model.config._name_or_path or type(model).__name__} is quantized already "
            f"({getattr(method, 'value', method)}); load the original model, or give the checkpoint's directory, which "
            "is dequantized where it has 8 bits"
        )
