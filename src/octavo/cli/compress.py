"""Quantize a model, block by block, into a compressed-tensors checkpoint with a report.

The checkpoint is what vLLM, transformers and `octavo serve` load; compression_report.json holds each layer's error and
says where the bytes went.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.compress.config import CompressConfig

EXAMPLES = """
  octavo compress demo --scheme W4A16 --algorithm gptq --output-dir demo-w4a16
  octavo compress ./model --recipe recipe.yaml --output-dir out --num-calibration-samples 256
"""


def settings() -> tuple[type, ...]:
    from octavo.compress.config import CompressConfig

    return (CompressConfig,)


def run(config: CompressConfig) -> int:
    from octavo.compress import run as compress

    compress(config)
    return 0
