"""Factors by which channels between two layers are divided in the first and multiplied in the second.

With s > 0 a channel, (x / s) (W diag(s))' = x W': what the layers compute stays as it is, what they round does not.
x are the inputs of linear layers W [N, K] and s is [K].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST, _MOST = 1e-4, 1e4  # factors beyond lose digits of the weights instead of moving outliers


def smoothquant_factors(peaks: Tensor, weights: Sequence[Tensor], strength: float) -> Tensor:
    """s = a ** strength / w ** (1 - strength), from the magnitudes of the inputs a [K] and the largest weights w [K].

    Xiao et al., "SmoothQuant" (2022). 0 leaves all to the activations, 1 all to the weights; LLM Compressor's factors
    when `peaks` is the range of each input. Inputs that no weight reads get s = a, as there.
    """
    largest = 2 * torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0)
    factors = peaks.pow(strength) / largest.pow(1 - strength).clamp_min(1e-30)
    return usable_factors(torch.where(largest == 0, peaks, factors))


def log_equalization_factors(peaks: Tensor) -> Tensor:
    """s = a / log2(2 + a) for the range of each input a [K] (Li et al., "FPTQ", 2023)."""
    return usable_factors(peaks / torch.log2(2 + peaks))


def relative_magnitudes(weights: Sequence[Tensor], group_size: int) -> Tensor:
    """Mean over all rows of |w| / (largest |w| of its group of inputs), [K]: how much room a weight fills."""
    total = torch.zeros(weights[0].shape[1], device=weights[0].device)
    for weight in weights:
        groups = weight.abs().unflatten(1, (-1, group_size))
        total += (groups / (groups.amax(dim=-1, keepdim=True) + 1e-6)).sum(dim=0).flatten()
    return total / sum(len(weight) for weight in weights)


def awq_candidates(inputs: Tensor, weights: Tensor, n_grid: int, duo_scaling: bool | str) -> list[Tensor]:
    """The factors that AWQ tries, [K] each: ones, then powers of the mean input magnitudes [K].

    Lin et al., "AWQ" (2023): s = x ** r for r from 0 to 1. `duo_scaling` (AutoAWQ's): s = x ** r / w ** (1 - r) with
    the relative magnitudes w [K] of the weights; "both" spends half of the `n_grid` candidates on each. The smallest
    and the largest factor of a candidate multiply to 1.
    """
    kinds = {True: (True,), False: (False,), "both": (True, False)}[duo_scaling]
    candidates = [torch.ones_like(inputs)]
    for duo in kinds:
        count = max(n_grid // len(kinds), 2)
        for step in range(count):
            ratio = step / (count - 1)
            factors = inputs.pow(ratio)
            factors = factors / (weights.pow(1 - ratio) + 1e-4) if duo else factors
            factors = factors.clamp_min(1e-4)
            candidates.append(usable_factors(factors / (factors.max() * factors.min()).sqrt()))
    return candidates


def usable_factors(factors: Tensor) -> Tensor:
    """Factors between 1e-4 and 1e4; those that are no number become 1."""
    return torch.where(torch.isfinite(factors), factors, torch.ones_like(factors)).clamp(_LEAST, _MOST)


def exact_for_norm(factors: Tensor, weight: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    """A norm's weight [K] divided by factors, and the factors that this is exact for.

    The norm multiplies by `offset` + weight. Its weight keeps the digits that it has (a bfloat16 norm in a float32
    model stays one), so that storing it changes nothing: what rounding takes away is given to the factors, which end
    up in weights that are rounded anyway. Weights that are zero, or would become zero, keep their factor 1.
    """
    scale = weight.float() + offset
    divided = (scale / factors - offset).to(_least_dtype(weight)).float()
    exact = scale / (divided + offset)
    kept = torch.isfinite(exact) & (exact > 0)
    return torch.where(kept, divided, weight.float()).to(weight.dtype), torch.where(kept, exact, torch.ones_like(exact))


def _least_dtype(weight: Tensor) -> torch.dtype:
    """The shortest dtype that holds all these values."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return dtype
    return weight.dtype
