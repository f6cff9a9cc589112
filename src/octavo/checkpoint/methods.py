"""Which reader serves the quantization that a checkpoint's configuration names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.checkpoint.awq import AWQReader
from octavo.checkpoint.compressed_tensors import CompressedReader
from octavo.checkpoint.config_fields import Fields
from octavo.checkpoint.fp8 import FP8Reader
from octavo.checkpoint.gptq import GPTQReader
from octavo.checkpoint.module_reader import ModuleReader, StoredTensors
from octavo.checkpoint.mxfp4 import MXFP4Reader
from octavo.checkpoint.quantization_config import METHODS, QuantizationConfig, quantization_fields
from octavo.checkpoint.sparse import SparseReader
from octavo.errors import UnsupportedModelError

OTHERS: dict[str, Callable[[Fields, StoredTensors], ModuleReader]] = {
    "gptq": GPTQReader,
    "awq": AWQReader,
    "fp8": FP8Reader,
    "mxfp4": MXFP4Reader,
}
# Where the authors of a method kept its configuration before it came into config.json.
OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def module_reader(config: dict[str, Any], path: Path, source: StoredTensors) -> ModuleReader | None:
    """The reader for a checkpoint's quantization_config; None for a plain one, UnsupportedModelError by name."""
    fields = quantization_fields(config, path)
    if fields is None:
        return None
    method = fields.text("quant_method", METHODS[0])
    if method in OTHERS:
        return OTHERS[method](fields, source)
    if method not in METHODS:
        raise UnsupportedModelError(
            f"{path}: the quantization method {method!r} is not read; {METHODS[0]}, {', '.join(OTHERS)} are. "
            "Use the unquantized model, and `octavo compress` to make it small"
        )
    parsed = QuantizationConfig.parse(fields.content, path)
    if parsed.sparsity != "dense":
        return SparseReader(parsed, source, path)
    if any(group.format == "marlin-24" for group in parsed.groups):
        raise UnsupportedModelError(f"{path}: the format 'marlin-24' is not read; use another checkpoint of the model")
    return CompressedReader(parsed, source)
