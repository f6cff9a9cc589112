"""gpt-oss's own MXFP4: experts' weights as blocks of 32 four-bit floats with a power of two each.

NAME_blocks uint8 [E, N, K / 32, 16], NAME_scales uint8 [E, N, K / 32]; the dense NAME is [E, K, N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.checkpoint.config_fields import Fields
from octavo.checkpoint.module_reader import ModuleReader, StoredTensors
from octavo.checkpoint.small_floats import E2M1, decode_nibbles, power_of_two
from octavo.errors import CheckpointError

BLOCKS, SCALES = "_blocks", "_scales"


class MXFP4Reader(ModuleReader):
    """Comes dense: there is no kernel."""

    def __init__(self, fields: Fields, source: StoredTensors) -> None:
        super().__init__(source)

    def dense_name(self, name: str) -> str | None:
        if name.endswith(BLOCKS):
            return name.removesuffix(BLOCKS)
        return None if name.endswith(SCALES) and self.holds(name.removesuffix(SCALES)) else name

    def holds(self, name: str) -> bool:
        return self._source.has_stored(f"{name}{BLOCKS}")

    def stored_bits(self, name: str) -> int:
        return 4

    def read(self, name: str) -> Tensor:
        blocks, scale = self._source.stored(f"{name}{BLOCKS}"), self._source.stored(f"{name}{SCALES}")
        fits = blocks.dim() == 4 and blocks.shape[:3] == scale.shape and blocks.dtype == scale.dtype == torch.uint8
        if not fits:
            raise CheckpointError(
                f"{name}{BLOCKS} {blocks.dtype} {list(blocks.shape)} and {name}{SCALES} {scale.dtype} "
                f"{list(scale.shape)} do not belong together: uint8 [E, N, K / 32, 16] and [E, N, K / 32] do"
            )
        self.note_dense("MXFP4")
        values = decode_nibbles(blocks, E2M1) * power_of_two(scale).unsqueeze(-1)
        return values.flatten(2).transpose(1, 2).contiguous()
