"""Masks and the blocked SparseGPT against naive ones, and what the pruning modifiers do with layers that are hard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo.compress.gptq_solver import inverse_factor
from octavo.compress.modifiers.base import LinearLayer
from octavo.compress.modifiers.magnitude import ConstantPruningModifier, MagnitudePruningModifier
from octavo.compress.modifiers.owl import outliers, owl_sparsities
from octavo.compress.modifiers.sparsegpt import SparseGPTModifier
from octavo.compress.modifiers.wanda import WandaPruningModifier
from octavo.compress.pruning import MaskStructure, magnitude_mask, smallest, sparsegpt, wanda_mask
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError

FREE, TWO_FOUR = MaskStructure(), MaskStructure(2, 4)


def correlated_inputs(columns: int, tokens: int = 400, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + torch.randn(columns, columns, generator=generator) / columns**0.5
    return torch.randn(tokens, columns, generator=generator) @ mix * (torch.rand(columns, generator=generator) + 0.1)


def random_weight(rows: int, columns: int, seed: int = 5) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def seen(inputs: Tensor, kind: str) -> InputStatistics:
    statistics = InputStatistics(inputs.shape[1], {kind})
    statistics.add(inputs)
    return statistics


def layer(weight: Tensor, name: str = "model.layers.1.mlp.up_proj", mask: Tensor | None = None) -> LinearLayer:
    return LinearLayer(name, weight, None, torch.float32, mask=mask)


def naive_sparsegpt(
    weight: Tensor, hessian: Tensor, sparsity: float, structure: MaskStructure, block: int, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """Column by column in float64, the inverse recomputed for each remaining set of columns: the paper's steps."""
    columns = weight.shape[1]
    work, mask = weight.double().clone(), torch.zeros_like(weight, dtype=torch.bool)
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(columns, dtype=torch.float64)
    # The first diagonal entry of the inverse over the columns from j on is the square of the Cholesky factor's.
    first = torch.stack([torch.linalg.inv(damped[j:, j:])[0, 0] for j in range(columns)])
    step = block if structure.is_free else structure.of
    for column in range(columns):
        if column % step == 0:
            stop = min(column + step, columns)
            scores = work[:, column:stop].square() / first[column:stop]
            scores[keep[:, column:stop]] = -1.0
            if structure.is_free:
                count = int(scores.numel() * sparsity + 1e-6)
                chosen = torch.zeros(scores.numel(), dtype=torch.bool)
                chosen[torch.argsort(scores.flatten())[:count]] = True
                mask[:, column:stop] = chosen.reshape(scores.shape)
            else:
                for row in range(len(work)):
                    mask[row, column + torch.argsort(scores[row])[: structure.zeros]] = True
            mask[:, column:stop] |= keep[:, column:stop]
        inverse = torch.linalg.inv(damped[column:, column:])
        error = torch.where(mask[:, column], work[:, column], 0.0) / inverse[0, 0]
        work[:, column:] -= error[:, None] * inverse[0][None, :]
        work[mask[:, column], column] = 0.0
    return work, mask


@pytest.mark.parametrize(
    ("structure", "block", "sparsity"), [(FREE, 128, 0.5), (FREE, 40, 0.7), (TWO_FOUR, 128, 0.5), (TWO_FOUR, 10, 0.5),
                                         (MaskStructure(3, 8), 32, 0.375), (MaskStructure(5, 20), 128, 0.25)]
)  # fmt: skip
@pytest.mark.parametrize("preserve", [False, True])
def test_blocked_sparsegpt_equals_the_naive_one(
    structure: MaskStructure, block: int, sparsity: float, preserve: bool
) -> None:
    columns = 120
    inputs, weight = correlated_inputs(columns), random_weight(16, columns)
    if preserve:
        weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(2)) < 0.2] = 0.0
    hessian = inputs.t() @ inputs
    factor, _ = inverse_factor(hessian, torch.arange(columns), 0.01)
    assert factor is not None
    dead = torch.zeros(columns, dtype=torch.bool)
    found, mask, errors = sparsegpt(weight, factor, dead, sparsity, structure, block, preserve)
    width = block if structure.is_free else max(1, block // structure.of) * structure.of
    keep = weight == 0
    expected, expected_mask = naive_sparsegpt(weight, hessian, sparsity, structure, width, keep)
    # Scores that are nearly the same may fall the other way in float32, which changes what follows in their rows.
    assert (mask == expected_mask).float().mean() > 0.995
    same = (mask == expected_mask).all(dim=1)
    torch.testing.assert_close(found[same], expected[same].float(), rtol=1e-3, atol=1e-3)
    assert bool((found[mask] == 0).all())
    change = found - weight
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns)
    torch.testing.assert_close(errors, torch.linalg.vecdot(change @ damped, change), rtol=1e-3, atol=1e-3)
    if preserve:
        assert bool((found[weight == 0] == 0).all())


def test_masks_have_the_structure_and_the_share() -> None:
    scores = torch.rand(8, 40, generator=torch.Generator().manual_seed(0))
    assert smallest(scores, 0.3, FREE, by_row=True).sum(dim=1).tolist() == [12] * 8
    assert int(smallest(scores, 0.3, FREE, by_row=False).sum()) == 96
    mask = smallest(scores, 0.9, TWO_FOUR, by_row=False)
    assert bool((mask.reshape(-1, 4).sum(dim=1) == 2).all())
    kept, dropped = scores.masked_fill(mask, 2.0).reshape(-1, 4), scores.masked_fill(~mask, -1.0).reshape(-1, 4)
    assert bool((kept.amin(dim=1) >= dropped.amax(dim=1)).all())


def test_wanda_and_magnitude_choose_as_their_papers_say() -> None:
    weight = torch.tensor([[1.0, -2.0, 3.0, -4.0], [4.0, 3.0, 2.0, 1.0]])
    squares = torch.tensor([100.0, 1.0, 1.0, 0.0])
    assert wanda_mask(weight, squares, 0.5, FREE).tolist() == [[False, True, False, True], [False, False, True, True]]
    expected = [[True, True, False, False], [False, False, True, True]]
    assert magnitude_mask(weight, 0.5, TWO_FOUR).tolist() == expected
    assert magnitude_mask(weight, 0.25, FREE).tolist() == [[True, False, False, False], [False, False, False, True]]


def test_zeros_that_are_there_can_be_kept() -> None:
    weight = random_weight(4, 8).masked_fill(torch.arange(8) % 4 == 0, 0.0)
    mask = magnitude_mask(weight, 0.5, TWO_FOUR, preserve=True)
    assert bool(mask[:, ::4].all())
    assert bool((mask.reshape(-1, 4).sum(dim=1) == 2).all())
    sparser = magnitude_mask(weight, 0.1, FREE, preserve=True)
    assert torch.equal(sparser, weight == 0)


def test_sparsegpt_beats_wanda_and_wanda_beats_magnitude() -> None:
    inputs, weight = correlated_inputs(64), random_weight(48, 64)
    exact = weight @ inputs.t()
    for structure in ("0:0", "2:4"):
        arguments: dict[str, Any] = {"sparsity": 0.5, "mask_structure": structure}
        errors = []
        for modifier, kind in (
            (SparseGPTModifier(**arguments), "hessian"),
            (WandaPruningModifier(**arguments), "diagonal"),
            (MagnitudePruningModifier(**arguments), "diagonal"),
        ):
            [result] = modifier.prune([layer(weight)], seen(inputs, kind))
            assert result.details["sparsity"] == 0.5
            assert bool((result.weight[result.mask] == 0).all())
            errors.append(float((result.weight @ inputs.t() - exact).square().sum() / exact.square().sum()))
            if kind == "hessian":
                assert result.error == pytest.approx(errors[0], rel=1e-3)
        assert errors[0] < errors[1] < errors[2]


def test_layers_that_share_inputs_are_pruned_as_if_alone() -> None:
    inputs = correlated_inputs(32)
    layers = [layer(random_weight(rows, 32, seed=rows)) for rows in (8, 20)]
    modifier = SparseGPTModifier(sparsity=0.5)
    together = modifier.prune(layers, seen(inputs, "hessian"))
    for one, result in zip(layers, together, strict=True):
        [alone] = modifier.prune([one], seen(inputs, "hessian"))
        assert torch.equal(alone.weight, result.weight)


def test_dead_inputs_and_layers_that_nothing_reached() -> None:
    inputs, weight = correlated_inputs(32), random_weight(8, 32)
    inputs[:, 5] = 0.0
    inputs[3, 7] = torch.nan
    [result] = SparseGPTModifier(sparsity=0.5).prune([layer(weight)], seen(inputs, "hessian"))
    assert result.details["dead_inputs"] == 1
    assert bool((result.weight[:, 5] == 0).all())
    assert bool(result.mask[:, 5].all())
    assert bool(torch.isfinite(result.weight).all())
    for modifier, what in (
        (SparseGPTModifier(sparsity=0.5), "SparseGPT"),
        (WandaPruningModifier(sparsity=0.5), "Wand"),
    ):
        for nothing in (None, seen(torch.full((2, 32), torch.inf), next(iter(modifier.statistics)))):
            [result] = modifier.prune([layer(weight)], nothing)
            assert f"by magnitude instead of {what}" in result.notes[0]
            assert torch.equal(result.mask, magnitude_mask(weight, 0.5, FREE))


def test_a_hessian_without_a_factor_leaves_wandas_choice() -> None:
    inputs, weight = correlated_inputs(32), random_weight(8, 32)
    statistics = seen(inputs, "hessian")
    statistics._squares.diagonal().neg_()
    statistics._squares[0, 0] = 1e9
    diagonal = statistics.diagonal().abs()
    statistics._squares.diagonal().abs_()
    statistics._squares[5, 3] = 1e12  # no such products come from real inputs
    [result] = SparseGPTModifier(sparsity=0.5).prune([layer(weight)], statistics)
    assert "by wanda instead of SparseGPT" in result.notes[0]
    assert torch.equal(result.mask, wanda_mask(weight, diagonal, 0.5, FREE))


@pytest.mark.parametrize("kind", [SparseGPTModifier, WandaPruningModifier, MagnitudePruningModifier])
def test_zeros_of_an_earlier_step_stay(kind: Any) -> None:
    inputs, weight = correlated_inputs(32), random_weight(8, 32)
    before = torch.arange(32) % 4 == 1
    modifier = kind(mask_structure="2:4")
    statistics = seen(inputs, next(iter(modifier.statistics), "diagonal"))
    given = layer(weight.masked_fill(before, 0.0), mask=before.expand(8, 32))
    [result] = modifier.prune([given], statistics)
    assert bool(result.mask[:, 1::4].all())
    assert bool((result.weight[result.mask] == 0).all())
    assert bool((result.mask.reshape(-1, 4).sum(dim=1) == 2).all())
    [kept] = ConstantPruningModifier().prune([layer(result.weight)], None)
    assert torch.equal(kept.mask, result.weight == 0)
    assert torch.equal(kept.weight, result.weight)


def test_a_sparsity_for_each_block() -> None:
    modifier = MagnitudePruningModifier(sparsity=[0.25, 0.75])
    [result] = modifier.prune([layer(random_weight(4, 16), "model.layers.1.mlp.up_proj")], None)
    assert result.details["sparsity"] == 0.75
    with pytest.raises(UserError, match="in block 2"):
        modifier.sparsity_of("model.layers.2.mlp.up_proj")


def test_owl_prunes_blocks_with_outliers_less() -> None:
    weight, squares = torch.ones(4, 4), torch.tensor([1.0, 1.0, 1.0, 10000.0])
    assert outliers(weight, squares, 3.0) == 4
    shares = owl_sparsities({0: 0.02, 1: 0.08, 2: 0.05}, 0.6, 0.08)
    assert sum(shares.values()) / 3 == pytest.approx(0.6)
    assert shares[1] == pytest.approx(0.52)
    assert shares[0] == pytest.approx(0.68)
    modifier = WandaPruningModifier(sparsity=0.6, sparsity_profile="owl")
    modifier.set_outliers({0: 0.02, 1: 0.08, 2: 0.05})
    assert modifier.sparsity_of("model.layers.1.mlp.up_proj") == shares[1]


@pytest.mark.parametrize(
    ("kind", "arguments", "match"),
    [
        (SparseGPTModifier, {}, "sparsity is None"),
        (SparseGPTModifier, {"sparsity": 1.0}, "below 1"),
        (SparseGPTModifier, {"sparsity": 0.4, "mask_structure": "2:4"}, "makes it 0.5"),
        (SparseGPTModifier, {"sparsity": 0.5, "mask_structure": "4:2"}, "N < M"),
        (SparseGPTModifier, {"sparsity": 0.5, "mask_structure": "half"}, "mask_structure"),
        (SparseGPTModifier, {"sparsity": 0.5, "dampening_frac": 0.0}, "dampening_frac"),
        (SparseGPTModifier, {"sparsity": 0.5, "block_size": 0}, "block_size"),
        (WandaPruningModifier, {"sparsity": 0.5, "sparsity_profile": "even"}, "owl"),
        (WandaPruningModifier, {"mask_structure": "2:4", "sparsity_profile": "owl"}, "0:0"),
        (WandaPruningModifier, {"sparsity": 0.05, "sparsity_profile": "owl"}, "owl_lmbda"),
        (MagnitudePruningModifier, {"sparsity": 0.5, "final_sparsity": 0.5}, "the same"),
        (MagnitudePruningModifier, {"final_sparsity": 0.5, "init_sparsity": 0.1}, "schedule"),
    ],
)
def test_wrong_arguments(kind: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        kind(**arguments)


def test_a_structure_that_does_not_divide_a_layer_is_refused() -> None:
    with pytest.raises(UserError, match="has 30 inputs"):
        MagnitudePruningModifier(mask_structure="2:4").claim("model.layers.0.fc", nn.Linear(30, 4))
    assert not MagnitudePruningModifier(mask_structure="2:4", ignore="re:.*fc").claim("a.fc", nn.Linear(30, 4))
