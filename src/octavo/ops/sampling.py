"""Choosing tokens from logits: plain torch definitions of `argmax` and `sample_tokens`.

Everything that decides which token is chosen is exact, so that no kernel's order of summation shows:

- A token's weight is floor(2^40 exp((x - max) / temperature)) as int64, the exponential and its argument in float32
  ((x - max) times the float32 reciprocal of the temperature). Sums of weights are exact; a token whose probability is
  below 2^-40 of the largest has no weight and is never drawn. Two implementations can differ only where their
  exponentials differ in the last bit, or their logarithms in min-p's bound.
- Tokens are ordered by their raw logit, the larger first, and equal logits by their index, the smaller first.
- min-p keeps (x - max) / temperature >= log(min_p); top-k the first k of those; top-p each of those that has less than
  top_p times their sum of weights before it. The first token is always kept.
- The draw takes the kept tokens by index, and the first whose running sum is above floor(u * sum), where u in [0, 1) is
  a hash of the request's seed and the token's position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GREEDY_TEMPERATURE = 1e-5  # below it the largest logit is taken; the same as octavo.core.sampling_params has
WEIGHT_BITS = 40  # 2^18 tokens of the largest weight still fit into 63 bits
LOWEST = -WEIGHT_BITS * math.log(2.0)  # (x - max) / temperature below which a weight is zero
NUM_CANDIDATES = 1024  # a cut rarely lies further down; rows for which it does are sorted whole

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def argmax(logits: Tensor) -> Tensor:
    """The index of each row's largest logit, the lowest on ties: [R, V] -> int64 [R]; -1 where a row holds a NaN."""
    best, index = logits.max(dim=-1)  # documented to give the first of several
    return torch.where(best.isnan(), -1, index)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities in float32 of logits [R, V]."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """One token for each row of logits [R, V]; see `octavo.ops.sample_tokens`."""
    tokens = argmax(logits)
    drawn = ((temperature >= GREEDY_TEMPERATURE) & (tokens >= 0)).nonzero().flatten()
    if not len(drawn):
        return tokens
    x = logits[drawn].float()
    top = x.amax(dim=1, keepdim=True)
    scaled = (x - top) * (1.0 / temperature[drawn].unsqueeze(1))
    weights = (scaled.exp() * 2.0**WEIGHT_BITS).to(torch.int64)
    floor = torch.where(min_p > 0, min_p, 0.0)[drawn].log().clamp(min=LOWEST).unsqueeze(1)
    weights = torch.where(scaled >= floor, weights, 0)
    restricted = ((top_k > 0) | (top_p < 1))[drawn].nonzero().flatten()
    if len(restricted):
        rows = drawn[restricted]
        weights[restricted] = cut(x[restricted], weights[restricted], top_k[rows], top_p[rows])
    chosen = pick(weights, counter_uniform(seed[drawn], position[drawn]))
    tokens[drawn] = torch.where(top[:, 0].isfinite(), chosen, -1)
    return tokens


def cut(x: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The weights [R, V] with zeros where top-k [R] (0: off) and then top-p [R] (1: off) drop a token of logits x."""
    vocab = x.shape[1]
    result, pending = _cut_within(x, weights, top_k, top_p, min(NUM_CANDIDATES, vocab))
    if len(pending):
        result[pending], _ = _cut_within(x[pending], weights[pending], top_k[pending], top_p[pending], vocab)
    return result


def _cut_within(x: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`cut` where it lies within the `size` largest logits, and the rows for which it does not."""
    value, ties, is_exact = _threshold(x, weights, top_k, top_p, size)
    at_value = x == value
    kept = x > value
    if bool((at_value.sum(dim=1, keepdim=True) > ties).any()):
        at_value &= at_value.cumsum(dim=1) <= ties
    return torch.where(kept | at_value, weights, 0), (~is_exact).nonzero().flatten()


def _threshold(x: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The logit [R, 1] at which the cut lies, how many tokens [R, 1] of exactly that logit stay, and is it exact [R].

    Looks at the `size` largest logits of each row. Which of several equal ones topk lists does not matter: they weigh
    the same.
    """
    values, indices = x.topk(size, dim=1)
    listed = weights.gather(1, indices)
    before = listed.cumsum(dim=1) - listed
    place = torch.arange(size, device=x.device).unsqueeze(0)
    limit = torch.where(top_k > 0, top_k, x.shape[1]).unsqueeze(1)
    in_top = place < limit
    total = torch.where(in_top, listed, 0).sum(dim=1, keepdim=True)
    is_inside = (limit <= size) | (listed[:, -1:] == 0)  # all that top-k leaves over is listed
    total = torch.where(is_inside | (top_k > 0).unsqueeze(1), total, weights.sum(dim=1, keepdim=True))
    needed = (top_p.double().unsqueeze(1) * total.double()).ceil().clamp(min=1).to(torch.int64)
    kept = in_top & ((before < needed) | (top_p >= 1).unsqueeze(1))
    last = kept.sum(dim=1, keepdim=True) - 1
    value = values.gather(1, last)
    ties = last + 1 - (values > value).sum(dim=1, keepdim=True)
    # A cut inside the list is exact when the mass that it refers to is known: all of it, or that of a listed top-k.
    is_known = is_inside | ((top_k <= 0).unsqueeze(1) & (last < size - 1))
    return value, ties, (is_known | (size == x.shape[1]))[:, 0]


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index at which the running sum of `weights` (int64 [R, V]) is above floor(uniform [R] * sum)."""
    running = weights.cumsum(dim=1)
    total = running[:, -1]
    target = torch.minimum((uniform * total.double()).to(torch.int64), total - 1)
    return torch.searchsorted(running, target.unsqueeze(1), right=True)[:, 0]


def counter_uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Numbers in [0, 1), a multiple of 2^-53 each, that hash seed and position (int64 [R]): float64 [R].

    Two rounds of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): the first adds
    position + 1 times its increment to the seed, the second its increment squared. int64 wraps as uint64 does.
    """
    state = seed
    for word in (position + 1, torch.full_like(position, _signed(GOLDEN))):
        state = state + word * _signed(GOLDEN)
        state = (state ^ _shift(state, 30)) * _signed(MIX_1)
        state = (state ^ _shift(state, 27)) * _signed(MIX_2)
        state = state ^ _shift(state, 31)
    return _shift(state, 11).double() * 2.0**-53


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits with zeros moved in, as for unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
