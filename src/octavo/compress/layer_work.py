"""Pruning and quantizing the linear layers of one block, by what was seen of their inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from octavo.compress.assignment import Plan
from octavo.compress.exact_stream import ExactInputs
from octavo.compress.experts import by_expert
from octavo.compress.model_source import ModelSource
from octavo.compress.modifiers.base import LayerResult, LinearLayer, PrunedLayer, Pruner
from octavo.compress.phases import Phases
from octavo.compress.rounding import dequantize
from octavo.compress.statistics import InputStatistics
from octavo.errors import CheckpointError

_CHECKED_AT_ONCE = 1 << 18  # values
Group = dict[str, nn.Linear]  # layers that read the same input, by full name; known by the first of them


class LayerWork:
    """Changes the layers of a plan in place; `results` has what became of those of the block in hand."""

    def __init__(self, source: ModelSource, plan: Plan, phases: Phases) -> None:
        self.source, self.plan, self.phases = source, plan, phases
        self.results: dict[str, LayerResult] = {}
        # Of the batch in hand, as far as they are known; None where it has no sequence for this.
        self.exact: ExactInputs | None = ExactInputs({}, 1, 1)
        self._inputs: dict[str, InputStatistics] = {}

    def begin(self) -> None:
        """A new block: forget the last one's inputs and results."""
        self.results, self._inputs = {}, {}

    def observe(self, group: Group, inputs: Tensor) -> None:
        """Take note of inputs [..., K] of a group."""
        first = next(iter(group))
        kinds = self.plan.layers[first].statistics
        if not kinds:
            return
        with self.phases("statistics"):
            if first not in self._inputs:
                self._inputs[first] = InputStatistics(inputs.shape[-1], kinds, inputs.device)
            self._add(self._inputs[first], first, inputs)

    def _add(self, statistics: InputStatistics, first: str, inputs: Tensor) -> None:
        if "drift" not in statistics.kinds or self.exact is None:
            statistics.add(inputs)
        elif (parts := self.exact.split(first, inputs)) is None:
            statistics.forget_drift()
            statistics.add(inputs)
        else:
            known, exact, others = parts
            statistics.add(known, exact)
            statistics.add(others)

    def change_once(self, group: Group, inputs: Tensor) -> None:
        """Change a group by these inputs, which are all; a layer that runs twice in a block is changed once."""
        if next(iter(group)) not in self.results:
            self.observe(group, inputs)
            self.change(group)

    def change_unseen(self, group: Group) -> None:
        """Change a group unless that was done: its layers never ran."""
        if next(iter(group)) not in self.results:
            self.change(group)

    def change(self, group: Group) -> None:
        """Prune and quantize a group by what was observed, which is then forgotten."""
        inputs = self._inputs.pop(next(iter(group)), None)
        for portion in by_expert(group):
            self._change(portion, inputs)

    def _change(self, group: Group, inputs: InputStatistics | None) -> None:
        assignment = self.plan.layers[next(iter(group))]
        with self.phases("quantize"):
            layers = [self._layer(name, module) for name, module in group.items()]
            pruned = [self._prune(pruner, layers, inputs) for pruner in assignment.pruners]
            if assignment.quantizer is None:
                results = [_only_pruned(layer) for layer in layers]
            else:
                results = assignment.quantizer.quantize(layers, inputs)
        for layer, result in zip(layers, results, strict=True):
            for stage in pruned:
                _add_to_report(result, stage[layer.name])
            if inputs is not None and inputs.non_finite:
                result.notes.append(
                    f"{result.name}: {inputs.non_finite} calibration tokens had non-finite inputs and were left out"
                )
            self.results[result.name] = result
            stored = layer.weight.to(self.source.dtype) if result.codes is None else restored(result)
            rewrite(group[result.name], stored)

    @staticmethod
    def _prune(pruner: Pruner, layers: list[LinearLayer], inputs: InputStatistics | None) -> dict[str, PrunedLayer]:
        pruned = {result.name: result for result in pruner.prune(layers, inputs)}
        for layer in layers:
            layer.weight, layer.mask = pruned[layer.name].weight, pruned[layer.name].mask
        return pruned

    def _layer(self, name: str, module: nn.Linear) -> LinearLayer:
        weight = module.weight.detach().float()
        refuse_non_finite(self.source.name, f"{name}.weight", weight)
        assignment = self.plan.layers[name]
        return LinearLayer(name, weight, assignment.scheme, self.source.dtype, assignment.observer)


def refuse_non_finite(model: str, name: str, weight: Tensor) -> None:
    """CheckpointError for a weight with NaN or infinite values."""
    if not all_finite(weight):
        bad = int((~torch.isfinite(weight)).sum())
        raise CheckpointError(
            f"{model}: {name} has {bad} values that are not finite; the checkpoint is broken, download it again"
        )


def all_finite(weight: Tensor) -> bool:
    """Whether there are neither NaN nor infinite values, with little memory.

    Piece by piece on a CPU, where a sum in float64 makes a copy in float64: 4 GB of an 8B model's embedding.
    """
    pieces = (weight,) if weight.is_cuda else weight.reshape(-1).split(_CHECKED_AT_ONCE)
    return all(math.isfinite(piece.sum(dtype=torch.float64)) for piece in pieces)


def restored(result: LayerResult) -> Tensor:
    """The float32 weight [N, K] that the codes of a quantized layer mean."""
    assert result.codes is not None and result.grid is not None and result.scheme is not None
    return dequantize(result.codes, result.grid, result.scheme)


def rewrite(module: nn.Linear, weight: Tensor) -> None:
    """Give a layer another weight, in its own dtype."""
    module.weight.copy_(weight.to(module.weight.dtype))


def _only_pruned(layer: LinearLayer) -> LayerResult:
    rows, columns = layer.weight.shape
    return LayerResult(layer.name, (rows, columns), None, None, None, layer.scale_dtype, 0.0)


def _add_to_report(result: LayerResult, pruned: PrunedLayer) -> None:
    """A layer that is quantized too keeps the quantizer's error, measured against the pruned weight, beside this."""
    if result.codes is None:
        result.error = pruned.error
        result.details |= pruned.details
    else:
        result.details |= {"pruning": {"error": pruned.error, **pruned.details}}
    result.notes += pruned.notes
