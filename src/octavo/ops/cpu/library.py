"""Opens the compiled kernels, if they were built and this CPU can run them."""

from __future__ import annotations

import torch


def prefers_interleaved(device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int) -> bool:
    """Whether the attention kernel that will run reads the interleaved order of `KVCache`."""
    return False
