"""Copies in bf16 of weights that are kept in codes, where the device has memory to spare.

Products of few rows wait for the weights to be read, so codes make them faster; products of many rows wait for the
arithmetic, and expanding the codes comes on top. With both forms in memory each step takes the faster one, and a large
batch of a 4-bit model runs as fast as the plain model does.
"""

from __future__ import annotations

import logging

import torch

from octavo.engine.loading import LoadedModel
from octavo.layers.layer import weights_of
from octavo.ops import PackedWeight

logger = logging.getLogger(__name__)

MOST_OF_MEMORY = 1 / 8  # the share that copies may take without being asked for


def keep_dense_copies(loaded: LoadedModel, wanted: bool | None) -> None:
    """Make the copies if they are wanted, or, with None, if all of them take an eighth of the device at most."""
    weights = [w for w in weights_of(loaded.model) if isinstance(w, PackedWeight) and w.dense_copy_bytes]
    num_bytes = sum(weight.dense_copy_bytes for weight in weights)
    if not weights or wanted is False:
        return
    if wanted is None and num_bytes > MOST_OF_MEMORY * torch.cuda.mem_get_info(loaded.device)[1]:
        return
    for weight in weights:
        weight.keep_dense_copy()
    logger.info("%.1f GiB of copies in bf16 beside the quantized weights, for large steps", num_bytes / 2**30)
