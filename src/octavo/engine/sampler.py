"""Chooses the next token of each row of logits.

Order, as vLLM's: raw log-probabilities are taken first; then allowed tokens, bad words, minimum length, logit bias and
penalties; then greedy choice, or temperature, min-p, top-k, top-p and one draw. The draw is the inverse transform of a
single uniform number that is a hash of the request's seed and the token's position, so it does not depend on the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.sampling_params import GREEDY_TEMPERATURE, SamplingParams
from octavo.engine.outputs import Logprob, Logprobs

NUM_CANDIDATES = 1024  # top-p rarely needs more; rows that do are sorted whole


@dataclass(slots=True)
class SamplingRow:
    """What sampling needs to know about one request."""

    params: SamplingParams
    seed: int
    tokens: list[int]  # the prompt and what was sampled; shared with the scheduler's request, which appends to it
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    bad_words: list[list[int]]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        p = self.params
        return bool(
            p.logit_bias
            or p.allowed_token_ids
            or self.bad_words
            or p.presence_penalty
            or p.frequency_penalty
            or p.repetition_penalty != 1.0
            or self.num_output_tokens < p.min_tokens
        )


@dataclass(slots=True)
class Sampled:
    """One token a row; `token_ids[r]` is None when row r held a NaN, so that only its request fails."""

    token_ids: list[int | None]
    logprobs: list[Logprobs | None]


def sample(logits: Tensor, rows: list[SamplingRow]) -> Sampled:
    """One token for each row of logits (float32 [R, V]). The logits may be changed in place."""
    wanted = [r for r, row in enumerate(rows) if row.params.logprobs is not None]
    raw = torch.log_softmax(logits[wanted], dim=-1) if wanted else None
    for r, row in enumerate(rows):
        if row.changes_logits:
            apply_processors(logits[r], row)
    best, greedy = logits.max(dim=-1)
    tokens: list[int | None] = greedy.tolist()
    drawn = [r for r, row in enumerate(rows) if not row.is_greedy]
    if drawn:
        for r, token in zip(drawn, draw(logits[drawn], [rows[r] for r in drawn]), strict=True):
            tokens[r] = token
    for r in torch.isnan(best).nonzero().flatten().tolist():
        tokens[r] = None
    logprobs: list[Logprobs | None] = [None] * len(rows)
    if raw is not None:
        valid = [(i, r) for i, r in enumerate(wanted) if tokens[r] is not None]
        chosen = [int(tokens[r] or 0) for _, r in valid]
        counts = [int(rows[r].params.logprobs or 0) for _, r in valid]
        for (_, r), entry in zip(valid, top_logprobs(raw[[i for i, _ in valid]], chosen, counts), strict=True):
            logprobs[r] = entry
    return Sampled(tokens, logprobs)


def top_logprobs(logprobs: Tensor, tokens: list[int], counts: list[int]) -> list[Logprobs]:
    """The given tokens' entries and the `counts[r]` most probable ones (-1: all), from log-probabilities [R, V]."""
    if not tokens:
        return []
    index = torch.tensor(tokens, device=logprobs.device).unsqueeze(1)
    chosen = logprobs.gather(1, index)
    ranks = ((logprobs > chosen).sum(dim=1) + 1).tolist()
    vocab = logprobs.shape[1]
    most = max(vocab if count < 0 else min(count, vocab) for count in counts)
    values, indices = logprobs.topk(most, dim=1) if most else (logprobs[:, :0], index[:, :0])
    result = []
    listed = zip(tokens, chosen[:, 0].tolist(), ranks, values.tolist(), indices.tolist(), counts, strict=True)
    for token, value, rank, row_values, row_indices, count in listed:
        entry = {token: Logprob(value, rank)}
        for place, (t, v) in enumerate(zip(row_indices[: None if count < 0 else count], row_values, strict=False)):
            entry.setdefault(t, Logprob(v, place + 1))
        result.append(entry)
    return result


def apply_processors(logits: Tensor, row: SamplingRow) -> None:
    """Restrict and shift one row of logits [V] in place, as the request asks."""
    params = row.params
    output = row.output_token_ids if row.bad_words else []
    if params.allowed_token_ids:
        allowed = torch.full_like(logits, -math.inf)
        allowed[params.allowed_token_ids] = 0.0
        logits += allowed
    for word in row.bad_words:
        if not word[:-1] or output[-len(word) + 1 :] == word[:-1]:
            logits[word[-1]] = -math.inf
    if row.num_output_tokens < params.min_tokens and row.stop_token_ids:
        logits[list(row.stop_token_ids)] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    apply_penalties(logits, row)


def apply_penalties(logits: Tensor, row: SamplingRow) -> None:
    """Repetition (over prompt and output), frequency and presence (over output) penalties on one row, in place."""
    params = row.params
    output = torch.tensor(row.output_token_ids, dtype=torch.long, device=logits.device)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(row.tokens, dtype=torch.long, device=logits.device).unique()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and len(output):
        tokens, counts = output.unique(return_counts=True)
        logits[tokens] -= params.frequency_penalty * counts + params.presence_penalty


def draw(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    """One token for each row by temperature, min-p, top-k and top-p (logits [R, V] are not changed)."""
    scaled = logits / logits.new_tensor([[row.params.temperature] for row in rows])
    uniform = torch.tensor([uniform_of(row.seed, row.num_output_tokens) for row in rows], dtype=torch.float64)
    uniform = uniform.to(logits.device)
    free = [r for r, row in enumerate(rows) if not _is_filtered(row.params)]
    tokens = [0] * len(rows)
    if free:
        for r, token in zip(free, pick(scaled[free].softmax(-1), uniform[free]).tolist(), strict=True):
            tokens[r] = token
    pending = [r for r in range(len(rows)) if r not in set(free)]
    size = min(NUM_CANDIDATES, logits.shape[1])
    while pending:
        probs, indices, is_exact = filter_candidates(scaled[pending], [rows[r].params for r in pending], size)
        places = pick(probs, uniform[pending]).unsqueeze(1)
        chosen = indices.gather(1, places)[:, 0].tolist()
        for r, token in zip(pending, chosen, strict=True):
            tokens[r] = token
        pending = [r for r, exact in zip(pending, is_exact.tolist(), strict=True) if not exact]
        size = logits.shape[1]
    return tokens


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def filter_candidates(scaled: Tensor, params: list[SamplingParams], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of the `size` most probable tokens after min-p, top-k and top-p; zero where a token is dropped.

    Returns (weights [R, size], token ids [R, size], exact [R]). A row is not exact when a token beyond the `size`
    looked at could have been kept; the caller then asks again with the whole vocabulary.
    """
    vocab = scaled.shape[1]
    values, indices = scaled.topk(size, dim=1)
    top_k = torch.tensor([[p.top_k if p.top_k > 0 else vocab] for p in params], device=scaled.device)
    top_p = scaled.new_tensor([[p.top_p] for p in params])
    min_p = scaled.new_tensor([[p.min_p] for p in params])
    total = scaled.logsumexp(dim=1, keepdim=True)
    place = torch.arange(size, device=scaled.device).unsqueeze(0)
    is_kept = (values >= values[:, :1] + min_p.log()) & (place < top_k)
    # The mass that top-p refers to is that of the tokens which min-p and top-k left over.
    is_complete = ~is_kept[:, -1:] | (size == vocab)
    mass = torch.where(is_kept, (values - total).exp(), 0.0)
    remaining = torch.where(is_complete, mass.sum(dim=1, keepdim=True), 1.0)
    before = mass.cumsum(dim=1) - mass
    is_kept &= before < top_p * remaining
    is_exact = is_complete | ~is_kept[:, -1:]
    # Without min-p and top-k the mass is the whole distribution's, so a cut inside the candidates is exact.
    is_restricted = (top_k < vocab) | (min_p > 0)
    is_exact = torch.where(is_restricted, is_complete, is_exact)
    return torch.where(is_kept, mass, 0.0), indices, is_exact[:, 0]


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """The index at which the running sum of `weights` [R, V] passes `uniform` [R] times the total: int64 [R]."""
    cumulative = weights.double().cumsum(dim=1)
    target = (uniform * cumulative[:, -1]).unsqueeze(1)
    place = torch.searchsorted(cumulative, target, right=True)
    # A target that rounding put at the very end would fall behind the last token that has any weight.
    last = weights.shape[1] - 1 - (weights.flip(1) > 0).int().argmax(dim=1, keepdim=True)
    return torch.minimum(place, last)[:, 0]


def uniform_of(seed: int, position: int) -> float:
    """A number in [0, 1) that is a hash of seed and position (the finalizer of splitmix64, applied twice)."""
    mask = (1 << 64) - 1
    state = seed & mask
    for word in (position + 1, 0x9E3779B97F4A7C15):
        state = (state + word * 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return (state >> 11) / (1 << 53)
