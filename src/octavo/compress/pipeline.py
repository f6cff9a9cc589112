"""The block pipeline: read a block, transform it, prune and quantize its layers, run it as changed to make the next
block's inputs, store it.

Memory is one block with its Hessians and the activations. Each transform that looks at inputs takes one pass over the
block. Where the whole calibration set fits in one batch, each layer is pruned and quantized in the middle of the
block's forward pass, just before it runs: its inputs then come from layers of the same block that are changed already,
and one pass over the data does for everything. Otherwise one pass gathers the statistics of all layers of the block
and another makes the outputs; layers that aim at the model as it came are observed and changed in stages instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.assignment import Plan
from octavo.compress.blocks import Blocks, siblings
from octavo.compress.exact_stream import ExactStream
from octavo.compress.kv_scales import KeyValueWatcher
from octavo.compress.layer_work import LayerWork, refuse_non_finite
from octavo.compress.memory import free_unused, returned_buffers
from octavo.compress.model_source import ModelSource
from octavo.compress.modifiers.base import LayerResult, Transform
from octavo.compress.phases import Phases
from octavo.compress.statistics import InputStatistics
from octavo.compress.walker import BlockWalker, Keep
from octavo.compress.watching import Group, hooked, in_stages, run_watched
from octavo.compress.work_folder import StoredBlock, WorkFolder
from octavo.units import size

Progress = Callable[[float, str | None], None]  # blocks that are done, with the share of the one in hand, and a note


class BlockPipeline:
    """Runs a plan over the blocks of a model; `phases` has the seconds by phase, `notes` what transforms said.

    Whatever draws random numbers draws the same in a block, whether the blocks before it were resumed or not.
    """

    def __init__(
        self,
        source: ModelSource,
        blocks: Blocks,
        plan: Plan,
        batches: list[Tensor],
        keep: Keep | None = None,
        seed: int = 0,
    ) -> None:
        self.source, self.blocks, self.plan, self.batches, self.seed = source, blocks, plan, batches, seed
        self.phases = Phases(source.device)
        self.notes: list[str] = []
        self._walker = BlockWalker(source.model, blocks, source.device, keep)
        self._work = LayerWork(source, plan, self.phases)
        self._exact: ExactStream | None = None
        self.kv_scales: dict[str, Tensor] = {}
        self._watcher: KeyValueWatcher | None = None
        if plan.kv_cache_scheme is not None:
            self._watcher = KeyValueWatcher(source.model, plan.kv_cache_scheme["strategy"], source.dtype)
        self._inside = (f"{blocks.prefix}.",)
        self._progress: Progress = lambda done, note: None
        self._done = 0.0

    @torch.no_grad()
    def run(self, folder: WorkFolder | None, progress: Progress) -> list[LayerResult]:
        """Compress all blocks, in order; blocks that `folder` has are taken from it. Returns every layer's result.

        With a folder the codes of a stored block are dropped from the results (they are in its file).
        """
        everything: list[LayerResult] = []
        self._progress = progress
        self._begin(folder)
        for index, block in enumerate(self.blocks.modules):
            self._done = float(index)
            if index + 1 < len(self.blocks.modules) and self._is_read(index + 1, folder):
                self.source.fetch(self.blocks.modules[index + 1], self.blocks.name(index + 1))
            results = self._block(index, block, folder)
            for result in results:
                _let_go(result, kept=folder is None)
            everything += results
            with self.phases("read"):
                self.source.release(block, self.blocks.name(index))
            progress(index + 1, _errors(results))
        self._exact = None
        self._walker.finish()  # the activations make room for a shard
        return everything

    def _is_read(self, index: int, folder: WorkFolder | None) -> bool:
        return bool(self.batches) or self.source.keep or folder is None or not folder.has(index)

    def _begin(self, folder: WorkFolder | None) -> None:
        """What lies outside the blocks is changed and used once; it is read again where it is stored."""
        transforms = self.plan.transforms
        with self.phases("read"):
            if any(transform.unties_embeddings for transform in transforms):
                self.source.untie()
            self.source.fill(self.source.model, "", self._unneeded())
        with self.phases("transform"):
            for transform in transforms:
                transform.read(self.source.model, "")
        self._settle(self.source.model, "", skip=self._inside)
        if folder is not None and transforms:
            with self.phases("write"):
                folder.save_outside(dict(self.source.stored("", self._inside)))
        if self.batches:
            self._read(0)
            with self.phases("forward"):
                self._walker.start(self.batches)
            self._begin_exact()
        with self.phases("read"):
            self.source.release(self.source.model, "", self._inside)

    def _begin_exact(self) -> None:
        if not any("drift" in assignment.statistics for assignment in self.plan.layers.values()):
            return
        if self._walker.keep.twice:
            self._exact = ExactStream(self._walker, self.batches)
        else:
            taken = size(sum(hidden.nbytes for hidden in self._walker.hidden))
            self.notes.append(
                f"layers aim at their outputs in the model as compressed so far: the inputs of the model as it came "
                f"would take another {taken}"
            )

    def _unneeded(self) -> tuple[str, ...]:
        """Beginnings of names that nothing asks for at the start: the blocks and, mostly, the output layer."""
        if self.plan.transforms or self.source.keep:
            return self._inside
        output = self.source.model.get_output_embeddings()
        names = [f"{name}." for name, module in self.source.model.named_modules() if module is output]
        return (*self._inside, *names) if self.batches else ("",)

    def _settle(self, module: nn.Module, prefix: str, skip: tuple[str, ...]) -> None:
        """Round to what will be stored: later layers see that, and a resumed run sees the same."""
        for name, value in module.named_parameters(prefix=prefix):
            if value.is_floating_point() and not value.is_meta and not name.startswith(skip):
                refuse_non_finite(self.source.name, name, value)
                value.copy_(value.to(self.source.dtype))

    def _read(self, index: int) -> None:
        block, name = self.blocks.modules[index], self.blocks.name(index)
        with self.phases("read"):
            self.source.fill(block, name)
        with self.phases("transform"):
            for transform in self.plan.transforms:
                transform.read(block, name)

    def _block(self, index: int, block: nn.Module, folder: WorkFolder | None) -> list[LayerResult]:
        name = self.blocks.name(index)
        done = None if folder is None else folder.load(index)
        if done is not None:
            return self._finished_block(index, done, self._is_read(index, folder))
        layers, notes = self._prepare(index)
        self.notes += notes
        self._work.begin()
        scales = self._compress_watched(index, layers)
        results = [self._work.results[full] for full in layers]
        if folder is not None:
            with self.phases("write"):
                folder.save(index, results, chain(self.source.stored(f"{name}."), scales.items()), notes)
        return results

    def _prepare(self, index: int) -> tuple[Group, list[str]]:
        """Read a block and transform it; the layers of it that are to change, and what the transforms say."""
        if index > 0 or not self.batches:
            self._read(index)
        torch.manual_seed(self.seed + index)
        notes = [note for transform in self.plan.transforms for note in self._transform(index, transform)]
        layers = self._layers(index)
        quantized = {full for full in layers if self.plan.layers[full].quantizer is not None}
        self._settle(self.blocks.modules[index], self.blocks.name(index), tuple(f"{full}.weight" for full in quantized))
        return layers, notes

    def _layers(self, index: int) -> Group:
        """The layers of block `index` that are to change."""
        return {full: module for full, module in self.blocks.linears(index) if full in self.plan.layers}

    def _finished_block(self, index: int, done: StoredBlock, is_read: bool) -> list[LayerResult]:
        """Go through a block of an interrupted run, whose weights are restored.

        What runs beside it has to see it as it was before, transforms and all, which look at the same inputs again. An
        expert that is watched runs on all tokens, of which products round otherwise, so the same layers are watched.
        """
        block, name = self.blocks.modules[index], self.blocks.name(index)
        self._progress(index, "going through finished blocks")
        groups = self._groups(index, self._layers(index))
        in_one_pass = len(self.batches) == 1
        if self._exact is not None:
            self._prepare(index)
            watched = groups if in_one_pass or not groups else in_stages(groups)[-1]
            for batch in range(len(self.batches)):
                with self.phases("forward"):
                    self._exact.advance(index, batch, watched)
        if is_read:
            with self.phases("read"):
                self.source.fill(block, name)
                done.restore(block, name)
        self.notes += done.notes
        with hooked(groups if in_one_pass else [], lambda group, inputs: None):
            self._advance(index)
        return done.results

    def _transform(self, index: int, transform: Transform) -> list[str]:
        wanted = transform.watch(index)
        if not wanted:
            return []
        block, prefix = self.blocks.modules[index], f"{self.blocks.name(index)}."
        modules = {name: block.get_submodule(name.removeprefix(prefix)) for name in wanted}
        seen: dict[str, InputStatistics] = {}

        def gather(members: dict[str, Any], inputs: Tensor) -> None:
            name = next(iter(members))
            with self.phases("statistics"):
                if name not in seen:
                    seen[name] = InputStatistics(inputs.shape[-1], wanted[name], inputs.device)
                seen[name].add(inputs)

        with hooked([{name: module} for name, module in modules.items()], gather):  # type: ignore[dict-item]
            self._forward(index)
        with self.phases("transform"):
            return transform.apply(index, block, seen)

    def _compress_watched(self, index: int, layers: Group) -> dict[str, Tensor]:
        """Compress a block; the scales of its KV cache, by full name, if they are asked for."""
        if self._watcher is None:
            self._compress(index, layers)
            return {}
        self._watcher.start(self.blocks.modules[index], self.blocks.name(index))
        self._compress(index, layers)
        scales = self._watcher.stop()
        self.kv_scales |= scales
        return scales

    def _compress(self, index: int, layers: Group) -> None:
        groups = self._groups(index, layers)
        needs_data = any(self.plan.layers[name].statistics for name in layers)
        if len(self.batches) == 1 and needs_data:
            if self._exact is not None:
                with self.phases("forward"):
                    self._work.exact = self._exact.advance(index, 0, groups)
            with hooked(groups, self._work.change_once):
                self._advance(index)
            for group in groups:
                self._work.change_unseen(group)
            return
        if self._exact is not None:
            self._change_in_stages(index, groups, self._exact)
        else:
            if self.batches and needs_data:
                self._observe(index, groups)
            self._change(groups)
        self._advance(index)

    def _change_in_stages(self, index: int, groups: list[Group], exact: ExactStream) -> None:
        """Observe and change what runs first in block `index` before what follows is observed.

        Layers that aim at the model as it came make good for what drifted so far: were the next ones observed before,
        they would make good for the same once more. The exact stream needs the block as it was, so a copy is kept.
        """
        original, stages = exact.copy_of(index), in_stages(groups)
        for stage in stages:
            firsts = {next(iter(group)): group for group in stage}
            for batch in range(len(self.batches)):
                with self.phases("forward"):
                    self._work.exact = exact.go_through(original, index, batch, stage, whole=stage is stages[-1])
                    run_watched(
                        lambda batch=batch: self._walker.run(index, batch),  # type: ignore[misc]
                        {name: group[name] for name, group in firsts.items()},
                        lambda name, inputs, firsts=firsts: self._work.observe(firsts[name], inputs),  # type: ignore[misc]
                        whole=False,
                    )
                self._step(0.5 / len(stages))
            self._change(stage)
        if not stages:
            for batch in range(len(self.batches)):
                exact.advance(index, batch)

    def _observe(self, index: int, groups: list[Group]) -> None:
        """All batches through block `index`, to see the inputs of `groups`."""
        for batch in range(len(self.batches)):
            with hooked(groups, self._work.observe), self.phases("forward"):
                self._walker.run(index, batch)
            self._step(0.5)

    def _change(self, groups: list[Group]) -> None:
        """Change groups whose inputs were seen, with the memory that the passes before them have freed."""
        with returned_buffers():
            for group in groups:
                self._work.change(group)
                free_unused()  # small ones: those of a search for scales

    def _forward(self, index: int) -> None:
        """All batches through block `index`, for what is hooked into it."""
        for batch in range(len(self.batches)):
            with self.phases("forward"):
                self._walker.run(index, batch)
            self._step(0.0)

    def _advance(self, index: int) -> None:
        # Nothing comes after the last block, but in one pass its layers are changed while it runs, and its keys seen.
        if index + 1 < len(self.blocks.modules) or len(self.batches) == 1 or self._watcher is not None:
            for batch in range(len(self.batches)):
                with self.phases("forward"):
                    self._walker.advance(index, batch)
                self._step(0.25)

    def _step(self, share: float) -> None:
        self._done += share / len(self.batches)
        if share:
            self._progress(self._done, None)

    def _groups(self, index: int, layers: Group) -> list[Group]:
        """Layers that read the same input and have the same modifiers, in the order in which they run.

        Names stand in for what the first block showed where there is no calibration data.
        """
        prefix = self.blocks.name(index)
        shared = [[f"{prefix}.{name}" for name in group] for group in self._walker.groups]
        seen = {name for group in shared for name in group}
        shared += siblings(name for name in layers if name not in seen)
        groups: list[Group] = []
        for candidates in shared:
            alike: dict[tuple[int, ...], Group] = {}
            for name in candidates:
                if name in layers:
                    key = tuple(id(modifier) for modifier in self.plan.layers[name].modifiers)
                    alike.setdefault(key, {})[name] = layers[name]
            groups += alike.values()
        return groups


def _let_go(result: LayerResult, kept: bool) -> None:
    """What was computed goes to the host's memory, or is in its file already."""
    if result.codes is None or result.grid is None:
        return
    if not kept:
        result.codes = result.grid = None
        return
    grid = result.grid
    zero = None if grid.zero_point is None else grid.zero_point.cpu()
    result.codes, result.grid = result.codes.cpu(), replace(grid, scale=grid.scale.cpu(), zero_point=zero)


def _errors(results: list[LayerResult]) -> str:
    return " ".join(["error", *(f"{result.name.rpartition('.')[2]} {result.error:.4f}" for result in results)])
