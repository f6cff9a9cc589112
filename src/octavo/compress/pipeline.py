"""The block pipeline: calibrate a block, change it, run it as changed to make the next block's inputs, store it.

Memory is one block with its Hessians and the activations. Where the whole calibration set fits in one batch, each
layer is quantized in the middle of the block's forward pass, just before it runs: its inputs then come from layers of
the same block that are quantized already, and one pass over the data does for everything. Otherwise a first pass
gathers the statistics of all layers of the block and a second makes the outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.assignment import Plan
from octavo.compress.blocks import Blocks
from octavo.compress.model_source import ModelSource
from octavo.compress.modifiers.base import LayerResult, LinearLayer, Modifier
from octavo.compress.rounding import dequantize
from octavo.compress.statistics import InputStatistics
from octavo.compress.walker import BlockWalker
from octavo.compress.work_folder import WorkFolder
from octavo.errors import CheckpointError

Progress = Callable[[list[LayerResult]], None]  # called with the layers of each block that is done


class BlockPipeline:
    """Runs a plan over the blocks of a model; `seconds` is spent by phase."""

    def __init__(self, source: ModelSource, blocks: Blocks, plan: Plan, batches: list[Tensor]) -> None:
        self.source, self.blocks, self.plan, self.batches = source, blocks, plan, batches
        self.seconds: dict[str, float] = {}
        self._walker = BlockWalker(source.model, blocks)
        self._results: dict[str, LayerResult] = {}

    @torch.no_grad()
    def run(self, folder: WorkFolder | None, progress: Progress) -> list[LayerResult]:
        """Compress all blocks, in order; blocks that `folder` has are taken from it. Returns every layer's result.

        With a folder the codes of a stored block are dropped from the results (they are in its file).
        """
        everything: list[LayerResult] = []
        self._begin()
        for index, block in enumerate(self.blocks.modules):
            results = self._block(index, block, folder)
            if folder is not None:
                for result in results:
                    result.codes = torch.empty(result.codes.shape, dtype=torch.int8, device="meta")
            everything += results
            with self._phase("read"):
                self.source.release(block)
            progress(results)
        return everything

    def _begin(self) -> None:
        with self._phase("read"):
            self.source.fill(self.source.model, "", skip=f"{self.blocks.prefix}.")
        if self.batches:
            with self._phase("read"):
                self.source.fill(self.blocks.modules[0], self.blocks.name(0))
            with self._phase("forward"):
                self._walker.start(self.batches)

    def _block(self, index: int, block: nn.Module, folder: WorkFolder | None) -> list[LayerResult]:
        name = self.blocks.name(index)
        with self._phase("read"):
            self.source.fill(block, name)
        layers = {full: module for full, module in self.blocks.linears(index) if full in self.plan.layers}
        done = None
        if folder is not None:
            done = folder.load(index, {full: self.plan.layers[full].scheme for full in layers})
        if done is not None:
            self._results = {result.name: result for result in done}
            for result in done:
                self._rewrite(layers[result.name], result)
            self._advance(index)
            return done
        self._results = {}
        self._compress(index, layers)
        results = [self._results[full] for full in layers]
        if folder is not None:
            with self._phase("write"):
                stored = {f"{full}.weight" for full in layers}
                dense = {n: t for n, t in self.source.stored(f"{name}.") if n not in stored}
                folder.save(index, results, dense)
        return results

    def _compress(self, index: int, layers: dict[str, nn.Linear]) -> None:
        groups = self._groups(index, layers)
        needs_data = any(self.plan.layers[name].modifier.statistics != "none" for name in layers)
        if len(self.batches) == 1 and needs_data:
            with self._hooks(groups, layers, self._quantize_on_the_way):
                self._advance(index)
            self._quantize_unseen(groups, layers)
            return
        statistics: dict[str, InputStatistics] = {}
        if self.batches and needs_data:
            with self._hooks(groups, layers, lambda group, inputs: self._observe(statistics, group, inputs)):
                for batch in range(len(self.batches)):
                    with self._phase("forward"):
                        self._walker.run(index, batch)
        for group in groups:
            self._quantize({name: layers[name] for name in group}, statistics.get(group[0]))
        self._advance(index)

    def _advance(self, index: int) -> None:
        # Nothing comes after the last block, except that in one pass its layers are quantized while it runs.
        if self.batches and (index + 1 < len(self.blocks.modules) or len(self.batches) == 1):
            with self._phase("forward"):
                self._walker.advance(index)

    def _groups(self, index: int, layers: dict[str, nn.Linear]) -> list[list[str]]:
        """Layers that read the same input and have the same modifier, in the order in which they run."""
        prefix = self.blocks.name(index)
        shared = [[f"{prefix}.{name}" for name in group] for group in self._walker.groups]
        seen = {name for group in shared for name in group}
        shared += [[name] for name in layers if name not in seen]
        groups: list[list[str]] = []
        for candidates in shared:
            by_modifier: dict[int, list[str]] = {}
            for name in candidates:
                if name in layers:
                    by_modifier.setdefault(id(self.plan.layers[name].modifier), []).append(name)
            groups += by_modifier.values()
        return groups

    @contextmanager
    def _hooks(
        self, groups: list[list[str]], layers: dict[str, nn.Linear], action: Callable[[Any, Tensor], None]
    ) -> Iterator[None]:
        """Call `action(group's layers, input)` before the first layer of each group runs."""
        handles = []
        for group in groups:
            members = {name: layers[name] for name in group}

            def hook(module: nn.Module, args: tuple[Any, ...], members: dict[str, nn.Linear] = members) -> None:
                action(members, args[0])

            handles.append(layers[group[0]].register_forward_pre_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _observe(self, statistics: dict[str, InputStatistics], group: dict[str, nn.Linear], inputs: Tensor) -> None:
        name = next(iter(group))
        kind = self.plan.layers[name].modifier.statistics
        if kind == "none":
            return
        with self._phase("hessian"):
            if name not in statistics:
                statistics[name] = InputStatistics(inputs.shape[-1], kind)
            statistics[name].add(inputs)

    def _quantize_on_the_way(self, group: dict[str, nn.Linear], inputs: Tensor) -> None:
        if next(iter(group)) in self._results:
            return  # a layer that runs twice in a block
        statistics: dict[str, InputStatistics] = {}
        self._observe(statistics, group, inputs)
        self._quantize(group, statistics.get(next(iter(group))))

    def _quantize_unseen(self, groups: list[list[str]], layers: dict[str, nn.Linear]) -> None:
        for group in groups:
            if group[0] not in self._results:
                self._quantize({name: layers[name] for name in group}, None)

    def _quantize(self, group: dict[str, nn.Linear], statistics: InputStatistics | None) -> None:
        modifier: Modifier = self.plan.layers[next(iter(group))].modifier
        with self._phase("quantize"):
            results = modifier.quantize([self._layer(name, module) for name, module in group.items()], statistics)
        for result in results:
            if statistics is not None and statistics.non_finite:
                result.notes.append(
                    f"{result.name}: {statistics.non_finite} calibration tokens had non-finite inputs and were left out"
                )
            self._results[result.name] = result
            self._rewrite(group[result.name], result)

    def _layer(self, name: str, module: nn.Linear) -> LinearLayer:
        weight = module.weight.detach().float().cpu()
        bad = int((~torch.isfinite(weight)).sum())
        if bad:
            raise CheckpointError(
                f"{self.source.name}: {name}.weight has {bad} values that are not finite; the checkpoint is broken, "
                "download it again"
            )
        assignment = self.plan.layers[name]
        return LinearLayer(name, weight, assignment.scheme, self.source.dtype, assignment.observer)

    @staticmethod
    def _rewrite(module: nn.Linear, result: LayerResult) -> None:
        module.weight.copy_(dequantize(result.codes, result.scale).to(module.weight.dtype))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Time spent in a phase; a phase inside another one is not counted twice."""
        outer, self._inner = getattr(self, "_inner", 0.0), 0.0
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner
            self._inner = outer + spent
