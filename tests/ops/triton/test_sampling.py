"""The sampling kernels against the torch definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops import sampling as definition
from octavo.ops.triton import sampling

NATIVE = torch.cuda.is_available()
VOCAB = 128_256 if NATIVE else 5_000  # several tiles of the kernel, the last one not full
SETTINGS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.5},
    {"top_k": 3000},
    {"top_k": 3000, "top_p": 0.95},
    {"top_p": 0.999, "temperature": 4.0},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.02, "temperature": 0.4},
    {"temperature": 0.0, "top_k": 3},
]


def parameters(settings: list[dict], device: torch.device, seed: int = 0) -> list[Tensor]:
    """The arguments of sample_tokens after the logits, one row a dictionary."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([s.get(name, default) for s in settings], dtype=dtype, device=device)

    rows = torch.arange(len(settings), device=device)
    return [
        column("temperature", 1.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        rows * 7919 + seed,
        rows % 3,
    ]


def logits_like(kind: str, rows: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, VOCAB, generator=generator) * 3
    if kind == "ties":  # a few different values only
        x = x.round()
    if kind == "masked":
        x[:, torch.randperm(VOCAB, generator=generator)[: VOCAB - 700]] = -torch.inf
    return x.to(device, torch.bfloat16 if kind == "bfloat16" else torch.float32)


def kept_weights(logits: Tensor, params: list[Tensor]) -> Tensor:
    """Integer weights [R, V] of the tokens that may be drawn, by sorting whole rows."""
    temperature, top_k, top_p, min_p = (p.cpu() for p in params[:4])
    x = logits.float().cpu()
    scaled = (x - x.amax(1, keepdim=True)) * (1 / temperature)[:, None]
    result = torch.zeros(x.shape, dtype=torch.int64)
    for r in range(len(x)):
        weights = (scaled[r].exp() * 2.0**definition.WEIGHT_BITS).long()
        weights[scaled[r] < min_p[r].log()] = 0
        order = x[r].argsort(descending=True, stable=True)
        if top_k[r] > 0:
            weights[order[top_k[r] :]] = 0
        if top_p[r] < 1:
            listed = weights[order]
            before = listed.cumsum(0) - listed
            weights[order[before.double() >= top_p[r].double() * listed.sum().double()]] = 0
        result[r] = weights
    return result


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "ties", "masked"])
def test_the_kernel_draws_what_the_definition_draws(kind: str, device: torch.device) -> None:
    logits = logits_like(kind, len(SETTINGS), device)
    for seed in range(20 if NATIVE else 1):
        params = parameters(SETTINGS, device, seed)
        expected = definition.sample_tokens(logits, *params)
        chosen = sampling.sample_tokens(logits, *params)
        # An exponential's last bit may move a running sum past the target: then a neighbour by weight is right as well.
        for r in (chosen != expected).nonzero().flatten().tolist():
            assert_next_to_the_target(logits[r : r + 1], [p[r : r + 1] for p in params], int(chosen[r]))


def assert_next_to_the_target(logits: Tensor, params: list[Tensor], token: int) -> None:
    weights = kept_weights(logits, params)[0]
    assert weights[token] > 0
    running = weights.cumsum(0).double() / weights.sum()
    uniform = float(definition.counter_uniform(params[4], params[5]))
    assert float(running[token]) > uniform - 1e-6
    assert float(running[token] - weights[token] / weights.sum()) < uniform + 1e-6


@pytest.mark.parametrize(
    "limits", [{"top_k": 5}, {"top_p": 0.42}, {"min_p": 0.985}, {"top_k": 7, "top_p": 0.6}, {"top_k": 3, "min_p": 0.4}]
)
def test_all_that_is_kept_is_drawn_and_nothing_else(limits: dict, device: torch.device) -> None:
    """Ten tokens of nearly the same weight, some of exactly the same, among tokens that no limit keeps."""
    count = 5_000 if NATIVE else 50
    logits = torch.full((1, 600), -8.0)
    logits[0, 50:600:61] = torch.tensor([2.0, 2.0, 1.99, 2.0, 1.98, 1.99, 1.98, 2.0, 1.98, 1.99])
    logits = logits.to(device)
    params = parameters([limits] * count, device)
    chosen = sampling.sample_tokens(logits.expand(count, -1), *params)
    kept = kept_weights(logits, [p[:1] for p in params])[0].nonzero().flatten()
    assert 1 < len(kept) < 10
    assert torch.equal(chosen.cpu().unique(), kept)


@pytest.mark.gpu
def test_many_draws_follow_the_weights(device: torch.device) -> None:
    """Chi-square of draws by the kernel over the tokens that top-k and top-p leave."""
    count = 20_000
    logits = (torch.randn(1, 30, generator=torch.Generator().manual_seed(2)) * 1.5).to(device)
    params = parameters([{"top_k": 12, "top_p": 0.95, "temperature": 0.8}] * count, device)
    chosen = sampling.sample_tokens(logits.expand(count, -1), *params).cpu()
    weights = kept_weights(logits, [p[:1] for p in params])[0].double()
    expected = weights / weights.sum() * count
    observed = torch.bincount(chosen, minlength=30).double()
    kept = expected > 0
    assert (observed[~kept] == 0).all()
    statistic = float(((observed - expected)[kept].square() / expected[kept]).sum())
    degrees = int(kept.sum()) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    logits = logits_like("float32", len(SETTINGS), device)
    params = parameters(SETTINGS, device)
    together = sampling.sample_tokens(logits, *params)
    for r in (2, 3, 6, len(SETTINGS) - 1):
        alone = sampling.sample_tokens(logits[r : r + 1], *(p[r : r + 1] for p in params))
        assert int(alone) == int(together[r])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_first_of_equal_ones_and_tells_nan(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, [4000, 4100, VOCAB - 1]] = 9.0
    x[1, 17] = torch.nan
    x[2] = -torch.inf
    x[3] = -0.0
    x[3, 4500] = 0.0  # equal to the others
    x[4] = -x[4].abs() - 1
    x[5, VOCAB - 1] = torch.inf
    x = x.to(device)
    expected = definition.argmax(x)
    assert expected[0] == 4000 and expected[1] == -1 and expected[3] == 0 and expected[5] == VOCAB - 1
    assert torch.equal(sampling.argmax(x), expected)
    greedy = parameters([{"temperature": 0.0}] * 6, device)
    assert torch.equal(sampling.sample_tokens(x, *greedy), expected)


def test_rows_that_hold_no_distribution_are_told(device: torch.device) -> None:
    x = torch.randn(4, 50)
    x[0, 3], x[1], x[2, 7] = torch.nan, -torch.inf, torch.inf
    params = parameters([{}] * 4, device)
    chosen = sampling.sample_tokens(x.to(device), *params)
    assert chosen[:3].tolist() == [-1, -1, -1] and chosen[3] >= 0
    assert torch.equal(chosen, definition.sample_tokens(x.to(device), *params))


def test_rows_may_be_a_slice_of_a_wider_buffer(device: torch.device) -> None:
    wide = torch.randn(3, 640, generator=torch.Generator().manual_seed(3)).to(device)
    logits = wide[:, :500]
    params = parameters([{"top_k": 5}, {"top_p": 0.8}, {}], device)
    assert torch.equal(sampling.sample_tokens(logits, *params), definition.sample_tokens(logits, *params))
    assert torch.equal(sampling.argmax(logits), logits.argmax(dim=1))


@pytest.mark.gpu
def test_a_captured_graph_draws_with_new_parameters(device: torch.device) -> None:
    logits = logits_like("float32", len(SETTINGS), device)
    params = parameters(SETTINGS, device)
    sampling.sample_tokens(logits, *params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sampling.sample_tokens(logits, *params)
    for seed in (1, 2):
        params[4].add_(seed)
        graph.replay()
        assert torch.equal(out, sampling.sample_tokens(logits, *params))
