"""Log-probabilities of rows of logits: one program a row, in tiles of one size, so that no other row shows in it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096


@triton.jit
def log_softmax_kernel(logits, out, row_stride, vocab, TILE: tl.constexpr):
    """out[row] = x - max - log(sum(exp(x - max))); the maximum and the sum are found together, lane by lane."""
    row = tl.program_id(0).to(tl.int64)
    lane_max = tl.full((TILE,), -3.0e38, tl.float32)
    lane_sum = tl.zeros((TILE,), tl.float32)
    for start in tl.range(0, vocab, TILE, num_stages=3):
        index = start + tl.arange(0, TILE)
        x = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, x)
        lane_sum = lane_sum * tl.exp(lane_max - new_max) + tl.exp(x - new_max)
        lane_max = new_max
    top = tl.max(lane_max, axis=0)
    shift = top + tl.log(tl.sum(lane_sum * tl.exp(lane_max - top), axis=0))
    for start in tl.range(0, vocab, TILE, num_stages=3):
        index = start + tl.arange(0, TILE)
        x = tl.load(logits + row * row_stride + index, mask=index < vocab, other=0.0).to(tl.float32)
        tl.store(out + row * vocab + index, x - shift, mask=index < vocab)


def log_softmax(logits: Tensor) -> Any:
    """See `octavo.ops.log_softmax`."""
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        return NotImplemented
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    if rows:
        log_softmax_kernel[(rows,)](logits, out, logits.stride(0), vocab, TILE, num_warps=16)
    return out
