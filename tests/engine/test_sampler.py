"""The sampler against plain definitions, on random logits."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.core.sampling_params import GREEDY_TEMPERATURE, SamplingParams
from octavo.engine.sampler import SamplingRow, draw, gather_logprobs, logprob_entries, sample, uniform_of, wrapped
from octavo.ops import sampling
from octavo.ops.sampling import counter_uniform, cut, pick

VOCAB = 3000


def row(output: list[int] | None = None, prompt: list[int] | None = None, seed: int = 0, **params) -> SamplingRow:
    bad_words = params.pop("bad_words", [])
    prompt = prompt or [1, 2, 3]
    return SamplingRow(SamplingParams(**params), seed, prompt + (output or []), len(prompt), frozenset({0}), bad_words)


def reference_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature, min-p, top-k and top-p in that order, each over what the one before left."""
    scaled = logits.double() / params.temperature
    probs = scaled.softmax(-1)
    kept = probs >= params.min_p * probs.max()
    order = scaled.argsort(descending=True, stable=True)
    if params.top_k > 0:
        in_top = torch.zeros(len(logits), dtype=torch.bool)
        in_top[order[: params.top_k]] = True
        kept &= in_top
    probs = torch.where(kept, probs, 0.0)
    probs /= probs.sum()
    ranked = probs[order]
    in_nucleus = torch.zeros(len(logits), dtype=torch.bool)
    in_nucleus[order] = (ranked.cumsum(0) - ranked) < params.top_p
    probs = torch.where(in_nucleus, probs, 0.0)
    return probs / probs.sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize(
    "limits",
    [{"top_k": 7}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.5}, {"min_p": 0.05}, {"top_k": 2000, "top_p": 0.99}, {}],
)
def test_filtered_weights_equal_the_definition(temperature: float, limits: dict) -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, VOCAB) * 3
    params = SamplingParams(temperature=temperature, **limits)
    expected = torch.stack([reference_distribution(line, params) for line in logits])
    scaled = (logits - logits.amax(1, keepdim=True)) / temperature
    weights = (scaled.exp() * 2.0**sampling.WEIGHT_BITS).long()
    weights[scaled < math.log(params.min_p or 1e-30)] = 0
    kept = cut(logits, weights, torch.full((4,), max(params.top_k, 0)), torch.full((4,), params.top_p))
    kept = kept.double() / kept.sum(1, keepdim=True)
    torch.testing.assert_close(kept, expected, atol=2e-6, rtol=1e-3)


@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.3}, {"top_k": 9, "top_p": 0.5}, {"top_k": 2500}])
def test_of_equal_logits_the_first_ones_stay(limits: dict) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 100:2900:100] = 1.0
    params = SamplingParams(**limits)
    expected = reference_distribution(logits[0], params)
    weights = ((logits - 1).exp() * 2.0**sampling.WEIGHT_BITS).long()
    kept = cut(logits, weights, torch.tensor([max(params.top_k, 0)]), torch.tensor([params.top_p]))
    assert torch.equal(kept[0] > 0, expected > 0)


def test_draws_follow_the_distribution() -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, 20) * 2
    params = SamplingParams(temperature=0.7, top_k=8)
    expected = reference_distribution(logits[0], params)
    count = 20000
    rows = [row(seed=s, temperature=0.7, top_k=8) for s in range(count)]
    tokens = torch.tensor(draw(logits.expand(count, -1), rows))
    observed = torch.bincount(tokens, minlength=20).double()
    assert (observed[expected == 0] == 0).all()
    kept = expected > 0
    statistic = float(((observed - count * expected)[kept].square() / (count * expected[kept])).sum())
    degrees = int(kept.sum()) - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


def test_draw_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, VOCAB)
    rows = [row(seed=s, output=[9] * s, top_p=0.9) if s % 2 else row(seed=s) for s in range(6)]
    together = draw(logits, rows)
    alone = [draw(logits[i : i + 1], [rows[i]])[0] for i in range(6)]
    assert together == alone


def test_uniform_numbers_are_uniform_and_differ_by_position() -> None:
    values = torch.tensor([uniform_of(7, p) for p in range(10000)])
    assert values.min() >= 0.0 and values.max() < 1.0
    assert abs(values.mean() - 0.5) < 0.02
    assert torch.histc(values, 10, 0, 1).min() > 850
    assert uniform_of(7, 1) != uniform_of(8, 1)


def test_uniform_numbers_of_tensors_are_the_same_bits() -> None:
    seeds = [0, 1, -5, 2**63 - 1, -(2**63), 2**64 + 3, hash((0, 1))]
    positions = [0, 1, 4095, 131071, 7, 8, 2**40]
    found = counter_uniform(torch.tensor([wrapped(s) for s in seeds]), torch.tensor(positions))
    assert found.tolist() == [uniform_of(s, p) for s, p in zip(seeds, positions, strict=True)]


def test_the_same_temperature_is_greedy_everywhere() -> None:
    assert sampling.GREEDY_TEMPERATURE == GREEDY_TEMPERATURE


def test_pick_never_chooses_a_token_without_weight() -> None:
    weights = torch.tensor([[0, 5, 0, 5, 0]])
    for u in (0.0, 0.25, 0.5, 0.75, 1.0 - 2.0**-53):
        assert int(pick(weights, torch.tensor([u], dtype=torch.float64))) == (1 if u < 0.5 else 3)


def test_logprobs_gathered_on_the_device_become_the_same_entries() -> None:
    torch.manual_seed(6)
    logprobs = torch.randn(3, 40).log_softmax(-1)
    tokens = [7, int(logprobs[1].argmax()), 3]
    entries = logprob_entries(
        gather_logprobs(logprobs, torch.tensor([*tokens[:2], -1]), 5).to_host(), tokens, [5, 2, 0]
    )
    assert entries[0][7].logprob == pytest.approx(float(logprobs[0, 7])) and len(entries[0]) in (5, 6)
    assert list(entries[1]) == logprobs[1].topk(2).indices.tolist() and entries[1][tokens[1]].rank == 1
    assert list(entries[2]) == [3]


def test_greedy_takes_the_largest_and_logprobs_come_from_the_raw_logits() -> None:
    torch.manual_seed(4)
    logits = torch.randn(2, VOCAB)
    expected = logits.log_softmax(-1)
    best = logits.argmax(-1).tolist()
    biased = row(temperature=0.0, logprobs=3, logit_bias={5: 100.0})
    result = sample(logits.clone(), [row(temperature=0.0, logprobs=2), biased])
    assert result.token_ids == [best[0], 5]
    first, second = result.logprobs
    assert first is not None and second is not None
    assert first[best[0]].rank == 1 and len(first) == 2
    assert first[best[0]].logprob == pytest.approx(float(expected[0, best[0]]), abs=1e-5)
    assert second[5].logprob == pytest.approx(float(expected[1, 5]), abs=1e-5)
    assert second[5].rank == int((expected[1] > expected[1, 5]).sum()) + 1
    assert len(second) in (3, 4)


def test_penalties_bias_and_masks() -> None:
    base = torch.zeros(10)
    base[4], base[5], base[6] = 2.0, 1.9, -1.0

    def chosen(**kwargs) -> int | None:
        return sample(base.clone().unsqueeze(0), [row(temperature=0.0, **kwargs)]).token_ids[0]

    assert chosen() == 4
    assert chosen(output=[4], repetition_penalty=1.5) == 5
    assert chosen(prompt=[4], repetition_penalty=1.5) == 5
    assert chosen(prompt=[4], presence_penalty=1.0) == 4  # presence counts the output only
    assert chosen(output=[4], presence_penalty=1.0) == 5
    assert chosen(output=[4, 4, 5], frequency_penalty=0.3) == 5
    assert chosen(allowed_token_ids=[6, 7]) == 7
    assert chosen(bad_words=[[4]]) == 5
    assert chosen(bad_words=[[3, 4]]) == 4
    assert chosen(bad_words=[[3, 4]], output=[3]) == 5


def test_minimum_length_forbids_the_end() -> None:
    logits = torch.zeros(1, 5)
    logits[0, 0] = 9.0
    assert sample(logits.clone(), [row(temperature=0.0, min_tokens=2)]).token_ids != [0]
    assert sample(logits.clone(), [row(temperature=0.0, min_tokens=2, output=[1, 1])]).token_ids == [0]


def test_a_row_of_nan_fails_alone() -> None:
    logits = torch.randn(3, VOCAB)
    logits[1] = math.nan
    result = sample(logits.clone(), [row(temperature=0.0, logprobs=1) for _ in range(3)])
    assert result.token_ids[1] is None
    assert result.token_ids[0] == int(logits[0].argmax()) and result.token_ids[2] == int(logits[2].argmax())
    assert result.logprobs[1] is None and result.logprobs[2] is not None
