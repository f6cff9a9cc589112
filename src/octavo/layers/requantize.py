"""Rounding weights again while they are loaded, where no kernel reads the codes that a checkpoint stores."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from octavo.checkpoint.base import Checkpoint
from octavo.errors import UserError
from octavo.layers.quantize import GROUP_SIZES, quantize_weight
from octavo.layers.weights import Weight, WeightSource

SCHEMES = ("W4A16",)
_BITS = 4

logger = logging.getLogger(__name__)


class RequantizingSource(WeightSource):
    """Linear weights that would take more bits in memory than in the checkpoint are rounded to 4 bits.

    Those are the types without a kernel, which are dequantized otherwise (GGUF's Q6_K, Q3_K and i-quants, FP8 by block,
    NVFP4, MXFP4), and 5 to 7 bits, which are kept as 8. What has a kernel stays exactly as
    it is stored, and so do embeddings, output layers and plain weights. The rounding is that of `quantize_weight`,
    whose groups of 128, 64 or 32 must divide a row; a weight with other rows is dequantized, with a warning.
    """

    def weight(self, module: str, shape: tuple[int, int], rotates: bool = False) -> Weight:
        value = super().weight(module, shape, rotates)
        bits = self.checkpoint.stored_bits(module)
        if bits is None or _bits_in_memory(value) <= max(bits, _BITS):
            return value
        if not any(shape[1] % size == 0 for size in GROUP_SIZES):
            logger.warning(
                "%s is dequantized: no group of %s divides its rows of %d elements",
                module,
                ", ".join(map(str, GROUP_SIZES)),
                shape[1],
            )
            return value
        dense = value if isinstance(value, Tensor) else value.dequantize(torch.float32)
        return quantize_weight(dense, "w4a16")


def _bits_in_memory(value: Weight) -> int:
    return 8 * value.element_size() if isinstance(value, Tensor) else value.scheme.num_bits


def check_requantize(scheme: str | None, quantization: str | None, checkpoint: Checkpoint) -> None:
    """Refuses a `requantize` that there is no way, or no reason, to follow."""
    if scheme is None:
        return
    if scheme not in SCHEMES:
        raise UserError(f"requantize is {scheme!r}; it must be {' or '.join(SCHEMES)}", param="requantize")
    if quantization is not None:
        raise UserError(
            f"requantize is {scheme!r} and quantization {quantization!r}: the former rounds the quantized weights of a "
            "checkpoint again, the latter plain ones; give one",
            param="requantize",
        )
    if all(checkpoint.stored_bits(name.removesuffix(".weight")) is None for name in checkpoint.names()):
        raise UserError(
            f"requantize is {scheme!r}, but {checkpoint.path} holds no quantized weights; "
            "quantization='w4a16' quantizes plain ones",
            param="requantize",
        )
