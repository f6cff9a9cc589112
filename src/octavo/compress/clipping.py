"""AWQ's clip search: the largest weights of a group are cut off where finer steps for the others gain more.

Lin et al., "AWQ: Activation-aware Weight Quantization" (2023). Groups are taken alone: the error of a group's part of
the output, tr(d H d') with the group's corner of the Hessian X'X, is exact for inputs that groups do not share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.compress.observers import choose_grid
from octavo.compress.rounding import dequantize, group_width, quantize
from octavo.compress.simulation import FutureLayer

_RATIOS = tuple(1 - step / 20 for step in range(10))  # of the largest magnitude: 1 down to 0.55


def clipped(layer: FutureLayer, hessian: Tensor) -> Tensor:
    """The weight [N, K] with every group's magnitudes cut to the best of a few bounds, for a Hessian [K, K].

    Only where rows have scales by group or by channel; others come back as they are.
    """
    scheme, weight = layer.scheme, layer.weight
    if scheme is None or scheme.strategy not in ("group", "channel"):
        return weight
    width = group_width(scheme, weight.shape[1])
    groups = weight.unflatten(1, (-1, width))
    corners = torch.stack([hessian[at : at + width, at : at + width] for at in range(0, len(hessian), width)])
    peaks = groups.abs().amax(dim=-1, keepdim=True)
    best, best_error = groups, torch.full(groups.shape[:2], torch.inf, device=weight.device)
    for ratio in _RATIOS:
        cut = groups.clamp(-ratio * peaks, ratio * peaks)
        flat = cut.flatten(1)
        grid = choose_grid(flat, hessian.diagonal(), scheme, layer.observer, torch.float32)
        difference = (dequantize(quantize(flat, grid, scheme), grid, scheme) - weight).unflatten(1, (-1, width))
        by_group = difference.transpose(0, 1)  # [G, N, width]
        error = torch.linalg.vecdot(by_group @ corners, by_group).t()
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better.unsqueeze(-1), cut, best)
    return best.flatten(1)
