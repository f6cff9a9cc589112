"""Chooses the next token of each row of logits.

Order, as vLLM's: raw log-probabilities are taken first; then allowed tokens, bad words, minimum length, logit bias and
penalties; then greedy choice, or temperature, min-p, top-k, top-p and one draw. The draw is the inverse transform of a
single uniform number that is a hash of the request's seed and the token's position, so it does not depend on the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo import ops
from octavo.core.sampling_params import GREEDY_TEMPERATURE, SamplingParams
from octavo.engine.outputs import Logprob, Logprobs


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
            or (self.stop_token_ids and self.num_output_tokens < p.min_tokens)
        )


@dataclass(slots=True)
class Sampled:
    """One token a row; `token_ids[r]` is None when row r held a NaN, so that only its request fails."""

    token_ids: list[int | None]
    logprobs: list[Logprobs | None]


def sample(logits: Tensor, rows: list[SamplingRow]) -> Sampled:
    """One token for each row of logits (float32 [R, V]). The logits may be changed in place."""
    wanted = [r for r, row in enumerate(rows) if row.params.logprobs is not None]
    raw = ops.log_softmax(logits[wanted]) if wanted else None
    for r, row in enumerate(rows):
        if row.changes_logits:
            apply_processors(logits[r], row)
    tokens = draw(logits, rows)
    logprobs: list[Logprobs | None] = [None] * len(rows)
    if raw is not None:
        valid = [(i, r) for i, r in enumerate(wanted) if tokens[r] is not None]
        chosen = [int(tokens[r] or 0) for _, r in valid]
        counts = [int(rows[r].params.logprobs or 0) for _, r in valid]
        for (_, r), entry in zip(valid, top_logprobs(raw[[i for i, _ in valid]], chosen, counts), strict=True):
            logprobs[r] = entry
    return Sampled(tokens, logprobs)


class LogprobTensors(NamedTuple):
    """Log-probabilities of chosen and of most probable tokens, wherever the logits are; nothing waits for them."""

    chosen: Tensor  # float32 [R]
    ranks: Tensor  # int64 [R]; 1 is the most probable
    values: Tensor  # float32 [R, n], descending
    indices: Tensor  # int64 [R, n]

    def to_host(self) -> LogprobTensors:
        """Copies in pinned memory, under way: valid after the stream was waited for. On a CPU, the same tensors."""
        if self.chosen.device.type == "cpu":
            return self
        return LogprobTensors(*(torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, True) for t in self))


def gather_logprobs(logprobs: Tensor, tokens: Tensor, count: int) -> LogprobTensors:
    """For each row of log-probabilities [R, V]: its token's (int64 [R], anything for -1) and the `count` largest.

    Nothing waits for a device, and shapes depend on no data.
    """
    chosen = logprobs.gather(1, tokens.clamp(min=0).unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1) + 1
    values, indices = logprobs.topk(min(count, logprobs.shape[1]), dim=1)
    return LogprobTensors(chosen[:, 0], ranks, values, indices)


def logprob_entries(gathered: LogprobTensors, tokens: list[int], counts: list[int]) -> list[Logprobs]:
    """Entries from tensors on the host: each row's token, and its `counts[r]` most probable (-1: all there are)."""
    result = []
    listed = zip(tokens, *(t.tolist() for t in gathered), counts, strict=True)
    for token, value, rank, row_values, row_indices, count in listed:
        entry = {token: Logprob(value, rank)}
        for place, (t, v) in enumerate(zip(row_indices[: None if count < 0 else count], row_values, strict=False)):
            entry.setdefault(t, Logprob(v, place + 1))
        result.append(entry)
    return result


def top_logprobs(logprobs: Tensor, tokens: list[int], counts: list[int]) -> list[Logprobs]:
    """The given tokens' entries and the `counts[r]` most probable ones (-1: all), from log-probabilities [R, V]."""
    if not tokens:
        return []
    most = max(logprobs.shape[1] if count < 0 else count for count in counts)
    gathered = gather_logprobs(logprobs, torch.tensor(tokens, device=logprobs.device), most)
    return logprob_entries(LogprobTensors(*(t.cpu() for t in gathered)), tokens, counts)


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


def draw(logits: Tensor, rows: list[SamplingRow]) -> list[int | None]:
    """One token for each row of logits [R, V] as its request asks, None where no distribution is left (a NaN)."""
    if all(row.is_greedy for row in rows):  # the parameters would cost more than the rest on a CPU
        tokens = ops.argmax(logits).tolist()
    else:
        tokens = ops.sample_tokens(logits, *sampling_tensors(rows, logits.device)).tolist()
    return [None if token < 0 else token for token in tokens]


def sampling_tensors(rows: list[SamplingRow], device: torch.device) -> tuple[Tensor, ...]:
    """What `ops.sample_tokens` takes beside the logits, for these rows."""
    params = [row.params for row in rows]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return (
        column([p.temperature for p in params], torch.float32),
        column([max(p.top_k, 0) for p in params], torch.int32),
        column([p.top_p for p in params], torch.float32),
        column([p.min_p for p in params], torch.float32),
        column([wrapped(row.seed) for row in rows], torch.int64),
        column([row.num_output_tokens for row in rows], torch.int64),
    )


def wrapped(seed: int) -> int:
    """The low 64 bits of a seed as a signed number, as int64 tensors hold them."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


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
