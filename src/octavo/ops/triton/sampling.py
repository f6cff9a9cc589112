"""Triton kernels that choose tokens: the definitions of `octavo.ops.sampling`, without a sort and without the host.

The largest logit of each row is found by many programs a row. One program a row then does the rest of a row that is
drawn: it narrows the place of the cut by bisection over the logits' values, where each pass counts and weighs the
tokens from the middle up and moves a bound to a logit that exists, so equal logits end the search. As soon as no more
than CAPACITY tokens can matter they are copied aside, in the order of their index, and the passes that follow read
only those. Sums of the integer weights are exact, so tile sizes do not change a token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import sampling as definition

SPLIT = 4096  # logits that one program looks through for the largest
TILE = 4096  # logits of a row looked at together
CAPACITY = 1024  # tokens copied aside
MAX_SPLITS_TOGETHER = 1024  # partial results of a row that one program can reduce; 4 million tokens of vocabulary

_SCALE = tl.constexpr(2.0**definition.WEIGHT_BITS)
_LOWEST = tl.constexpr(definition.LOWEST)
_GREEDY = tl.constexpr(definition.GREEDY_TEMPERATURE)
_GOLDEN = tl.constexpr(definition.GOLDEN)
_MIX_1 = tl.constexpr(definition.MIX_1)
_MIX_2 = tl.constexpr(definition.MIX_2)
_STAGES = tl.constexpr(3)  # tiles of a row under way at the same time
_NAN_KEY = tl.constexpr(0x7FFFFFFF)
_BY_VALUE = tl.constexpr(20)  # passes that divide the range of values; those after it halve the floats in between


@triton.jit
def _key(x):
    """An int32 that orders floats as they are; NaN, of either sign, above all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x == x, key, 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The float of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def split_max_kernel(logits, partial, row_stride, vocab, num_splits, SPLIT: tl.constexpr):
    """partial[row, split]: key of the largest logit in the high half, the inverted index in the low one."""
    row, split = tl.program_id(0), tl.program_id(1)
    index = split * SPLIT + tl.arange(0, SPLIT)
    x = tl.load(logits + row.to(tl.int64) * row_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    packed = (_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    packed = tl.where(index < vocab, packed, -0x7FFFFFFFFFFFFFFF)
    tl.store(partial + row * num_splits + split, tl.max(packed, axis=0))


@triton.jit
def _reduce_splits(partial, row, num_splits, SPLITS: tl.constexpr):
    """(key, index) of the row's largest logit."""
    split = tl.arange(0, SPLITS)
    packed = tl.load(partial + row * num_splits + split, mask=split < num_splits, other=-0x7FFFFFFFFFFFFFFF)
    best = tl.max(packed, axis=0)
    return (best >> 32).to(tl.int32), 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def argmax_kernel(partial, out, num_splits, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    key, index = _reduce_splits(partial, row, num_splits, SPLITS)
    tl.store(out + row, tl.where(key == _NAN_KEY, -1, index).to(tl.int64))


@triton.jit
def counter_uniform(seed, position):
    """A float64 in [0, 1) that hashes seed and position, as `octavo.ops.sampling.counter_uniform`."""
    golden = tl.full((), _GOLDEN, tl.uint64)
    state = seed.to(tl.uint64, bitcast=True)
    word = (position + 1).to(tl.uint64, bitcast=True)
    for _ in tl.static_range(2):
        state = state + word * golden
        state = (state ^ (state >> 30)) * tl.full((), _MIX_1, tl.uint64)
        state = (state ^ (state >> 27)) * tl.full((), _MIX_2, tl.uint64)
        state = state ^ (state >> 31)
        word = golden
    return (state >> 11).to(tl.int64, bitcast=True).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _weigh(x, top, inverse, floor):
    """(weight int64, is alive) of logits; min-p's bound and the smallest weight are in `floor`."""
    scaled = (x - top) * inverse
    alive = scaled >= floor
    return tl.where(alive, (tl.exp(scaled) * _SCALE).to(tl.int64), 0), alive


@triton.jit
def _measure(row, size, middle, top, inverse, floor, TILE: tl.constexpr):
    """Of the living tokens: count and weight of those >= middle, the smallest of them, and the largest below."""
    count = tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.int64)
    above = tl.full((TILE,), float("inf"), tl.float32)
    below = tl.full((TILE,), float("-inf"), tl.float32)
    for start in tl.range(0, size, TILE, num_stages=_STAGES):
        index = start + tl.arange(0, TILE)
        x = tl.load(row + index, mask=index < size, other=float("-inf")).to(tl.float32)
        weight, alive = _weigh(x, top, inverse, floor)
        is_above = alive & (x >= middle)
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, weight, 0)
        above = tl.minimum(above, tl.where(is_above, x, float("inf")))
        below = tl.maximum(below, tl.where(alive & (x < middle), x, float("-inf")))
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def _search(row, size, low, high, count, by_mass, target, enough, top, inverse, floor, TILE: tl.constexpr):
    """Narrow [low, high], which holds the smallest logit that stays, until it is one or `count` <= enough.

    `count` is that of the tokens from low up; a bound holds when count (or weight, if by_mass) from it up >= target.
    """
    # Few tokens are near the top: a search that may end early looks there first.
    share = tl.where(enough > 0, 0.75, 0.5)
    passes = 0
    while (low < high) & (count > enough):
        low_key, high_key = _key(low).to(tl.int64), _key(high).to(tl.int64)
        between = _value(((low_key + high_key + 1) >> 1).to(tl.int32))
        middle = tl.where(passes < _BY_VALUE, (1.0 - share) * low + share * high, between)
        middle = tl.where((middle > low) & (middle <= high), middle, high)
        count_above, mass_above, above, below = _measure(row, size, middle, top, inverse, floor, TILE)
        holds = tl.where(by_mass, mass_above, count_above.to(tl.int64)) >= target
        count = tl.where(holds, count_above, count)
        low = tl.where(holds, above, low)
        high = tl.where(holds, high, below)
        passes += 1
    return low, high, count


@triton.jit
def _above(row, size, value, top, inverse, floor, TILE: tl.constexpr):
    """(count, weight) of the tokens above a logit, and the same of those equal to it."""
    count, equals = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.int64)
    for start in tl.range(0, size, TILE, num_stages=_STAGES):
        index = start + tl.arange(0, TILE)
        x = tl.load(row + index, mask=index < size, other=float("-inf")).to(tl.float32)
        weight, alive = _weigh(x, top, inverse, floor)
        count += (x > value).to(tl.int32)
        equals += (alive & (x == value)).to(tl.int32)
        mass += tl.where(x > value, weight, 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.sum(equals, axis=0)


@triton.jit
def _set_aside(row, size, low, values, indices, top, inverse, floor, TILE: tl.constexpr, CAPACITY: tl.constexpr):
    """Copy the living tokens from `low` up, by index; the caller knows that they fit. The rest becomes -inf."""
    tl.store(values + tl.arange(0, CAPACITY), tl.full((CAPACITY,), float("-inf"), tl.float32))
    tl.debug_barrier()
    base = 0
    for start in tl.range(0, size, TILE, num_stages=_STAGES):
        index = start + tl.arange(0, TILE)
        x = tl.load(row + index, mask=index < size, other=float("-inf")).to(tl.float32)
        _, alive = _weigh(x, top, inverse, floor)
        taken = alive & (x >= low)
        num_taken = tl.sum(taken.to(tl.int32), axis=0)
        if num_taken > 0:
            place = base + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            tl.store(values + place, x, mask=taken)
            tl.store(indices + place, index, mask=taken)
        base += num_taken
    tl.debug_barrier()


@triton.jit
def _pick(row, size, value, ties, total, uniform, top, inverse, floor, TILE: tl.constexpr):
    """The place of the first kept token at which the running weight is above floor(uniform * total)."""
    target = (uniform * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    chosen = tl.full((), 0, tl.int32)
    seen = 0
    running = total - total
    for start in tl.range(0, size, TILE, num_stages=_STAGES):
        index = start + tl.arange(0, TILE)
        x = tl.load(row + index, mask=index < size, other=float("-inf")).to(tl.float32)
        weight, _ = _weigh(x, top, inverse, floor)
        at_value = (x == value).to(tl.int32)
        rank = seen + tl.cumsum(at_value, axis=0)
        kept = (x > value) | ((at_value > 0) & (rank <= ties))
        weight = tl.where(kept, weight, 0)
        sum_here = tl.sum(weight, axis=0)
        if (running <= target) & (running + sum_here > target):
            passed = running + tl.cumsum(weight, axis=0) > target
            chosen = tl.min(tl.where(passed, index, 0x7FFFFFFF), axis=0)
        running += sum_here
        seen += tl.sum(at_value, axis=0)
    return chosen


@triton.jit
def _narrow(row, size, low, high, count, k, top_p, enough, top, inverse, floor, total, TILE: tl.constexpr):
    """The first search: for top-k's cut where there is one, else for top-p's."""
    by_mass = k == 0
    target = tl.where(by_mass, _needed(top_p, total), k.to(tl.int64))
    return _search(row, size, low, high, count, by_mass, target, enough, top, inverse, floor, TILE)


@triton.jit
def _needed(top_p, total):
    """The weight that the tokens which stay must reach: top_p of the total, at least one unit of weight."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _finish(row, size, low, high, count, k, top_p, uniform, top, inverse, floor, total, TILE: tl.constexpr):
    """Complete the searches over one source and draw: the place of the chosen token in it."""
    by_count, by_mass = k > 0, top_p < 1.0
    low, high, count = _narrow(row, size, low, high, count, k, top_p, 0, top, inverse, floor, total, TILE)
    above, mass, equals = _above(row, size, low, top, inverse, floor, TILE)
    one, _ = _weigh(low, top, inverse, floor)
    ties = tl.where(by_count, k - above, equals)
    total = tl.where(by_count, mass + ties.to(tl.int64) * one, total)
    if by_mass:
        needed = _needed(top_p, total)
        if by_count:  # top-p of what top-k left over
            full = low + 0.0
            low, high, count = _search(row, size, low, top, count, by_mass, needed, 0, top, inverse, floor, TILE)
            above, mass, equals = _above(row, size, low, top, inverse, floor, TILE)
            ties = tl.where(low == full, ties, equals)
        one, _ = _weigh(low, top, inverse, floor)
        ties = tl.minimum(ties, ((needed - mass + one - 1) // one).to(tl.int32))
        total = mass + ties.to(tl.int64) * one
    return _pick(row, size, low, ties, total, uniform, top, inverse, floor, TILE)


@triton.jit(do_not_specialize=["num_splits"])
def sample_kernel(
    logits,
    partial,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    out,
    values,
    indices,
    row_stride,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """One token a row; rows whose temperature is below the greedy one take the largest logit and end at once."""
    row = tl.program_id(0)
    key, best = _reduce_splits(partial, row, num_splits, SPLITS)
    temperature = tl.load(temperatures + row)
    top = _value(key)
    is_number = (top - top) == 0.0
    token = tl.where((key == _NAN_KEY) | ((temperature >= _GREEDY) & (is_number == 0)), -1, best)
    if (temperature >= _GREEDY) & is_number:
        source = logits + row.to(tl.int64) * row_stride
        inverse = tl.div_rn(1.0, temperature)
        min_p, top_p = tl.load(min_ps + row), tl.load(top_ps + row)
        floor = tl.maximum(tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-38)), _LOWEST), _LOWEST)
        uniform = counter_uniform(tl.load(seeds + row), tl.load(positions + row))
        count, total, low, _ = _measure(source, vocab, float("-inf"), top, inverse, floor, TILE)
        k = tl.load(top_ks + row)
        k = tl.where(k < count, k, 0)
        high = tl.where((k > 0) | (top_p < 1.0), top, low)
        low, high, count = _narrow(
            source, vocab, low, high, count, k, top_p, CAPACITY, top, inverse, floor, total, TILE
        )
        if count <= CAPACITY:
            values += row.to(tl.int64) * CAPACITY
            indices += row.to(tl.int64) * CAPACITY
            _set_aside(source, vocab, low, values, indices, top, inverse, floor, TILE, CAPACITY)
            place = _finish(values, CAPACITY, low, high, count, k, top_p, uniform, top, inverse, floor, total, CAPACITY)
            token = tl.load(indices + place)
        else:
            token = _finish(source, vocab, low, high, count, k, top_p, uniform, top, inverse, floor, total, TILE)
    tl.store(out + row, token.to(tl.int64))


def _split_max(logits: Tensor) -> tuple[Tensor, int, int]:
    """The largest logit of each split of each row, how many splits there are, and the power of two above."""
    rows, vocab = logits.shape
    num_splits = triton.cdiv(vocab, SPLIT)
    partial = torch.empty((rows, num_splits), dtype=torch.int64, device=logits.device)
    split_max_kernel[(rows, num_splits)](logits, partial, logits.stride(0), vocab, num_splits, SPLIT=SPLIT, num_warps=8)
    return partial, num_splits, triton.next_power_of_2(num_splits)


def _covers(logits: Tensor) -> bool:
    return logits.stride(1) == 1 and 0 < logits.shape[1] <= SPLIT * MAX_SPLITS_TOGETHER


def argmax(logits: Tensor) -> Any:
    if not _covers(logits):
        return NotImplemented
    rows = len(logits)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        partial, num_splits, splits = _split_max(logits)
        argmax_kernel[(rows,)](partial, out, num_splits, SPLITS=splits, num_warps=1)
    return out


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Any:
    if not _covers(logits):
        return NotImplemented
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    partial, num_splits, splits = _split_max(logits)
    values = torch.empty((rows, CAPACITY), dtype=torch.float32, device=logits.device)
    indices = torch.empty((rows, CAPACITY), dtype=torch.int32, device=logits.device)
    sample_kernel[(rows,)](
        logits,
        partial,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        position,
        out,
        values,
        indices,
        logits.stride(0),
        vocab,
        num_splits,
        SPLITS=splits,
        TILE=TILE,
        CAPACITY=CAPACITY,
        num_warps=16,
    )
    return out
