"""AWQ's clip search: the largest weights of a group are cut off where finer steps for the others gain more.

Lin et al., "AWQ: Activation-aware Weight Quantization" (2023). Groups are taken alone: the error of a group's part of
the output, tr(d H d') with the group's corner of the Hessian X'X, is exact for inputs that groups do not share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.compress.rounding import group_width
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
    corners = torch.stack([hessian[at : at + width, at : at + width] for at in range(0, len(hessian), width)])
    importance, unscaled = hessian.diagonal(), torch.ones_like(hessian.diagonal())
    best_error = torch.full((len(weight), len(corners)), torch.inf, device=weight.device)
    best = torch.ones_like(best_error)
    for ratio in _RATIOS:
        by_group = layer.difference(importance, unscaled, ratio).unflatten(1, (-1, width)).transpose(0, 1)
        error = torch.linalg.vecdot(by_group @ corners, by_group).t()  # [N, G]
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, ratio, best)
    return layer.cut_to(best)
