"""One compression, from the parsed arguments to the checkpoint and its report."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.writer import write_json
from octavo.compress.assignment import Plan, make_plan
from octavo.compress.blocks import Blocks, find_blocks
from octavo.compress.calibration import CalibrationData, CalibrationSpec, load_calibration
from octavo.compress.chain import check_chain
from octavo.compress.estimate import Needs, check, estimate, fits
from octavo.compress.experts import calibrate_all_experts
from octavo.compress.export import CONFIG, RECIPE, REPORT, attach_copy, attach_save, write_checkpoint
from octavo.compress.memory import reused_buffers
from octavo.compress.model_source import ModelSource
from octavo.compress.modifiers.base import LayerResult, Modifier
from octavo.compress.pipeline import BlockPipeline
from octavo.compress.recipe import dump_recipe
from octavo.compress.report import environment, layer_entry, size_report
from octavo.compress.survey import survey
from octavo.compress.walker import Keep
from octavo.compress.work_folder import WorkFolder, begun_with, remove_work
from octavo.errors import UserError
from octavo.folders import output_folder
from octavo.ops.device import free_device_memory, peak_device_memory
from octavo.progress import Progress

_ONE_BATCH_BYTES = 3_000_000_000  # activations of the whole calibration set in one block that are still held at once
_BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}  # that keep the device busy
_BATCH = "sequences a batch"  # in the work folder
_MUCH = 1_000_000_000  # bytes of inputs that are kept from one block to the next


@dataclass
class CompressionResult:
    """Where the checkpoint is (None: not written) and the content of compression_report.json."""

    output_dir: Path | None
    report: dict[str, Any]


def plan_of(model: Any, modifiers: list[Modifier]) -> tuple[Blocks, Plan]:
    """The blocks of a model, which may be empty, and what a recipe does to them. UserError when it cannot be done."""
    check_chain(modifiers)
    blocks = find_blocks(model)
    return blocks, make_plan(model, blocks, modifiers)


class CompressionJob:
    """One compression, from the parsed arguments to the report."""

    def __init__(
        self, source: ModelSource, modifiers: list[Modifier], spec: CalibrationSpec, batch_size: int | None
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1", param="batch_size")
        self.source, self.modifiers, self.spec, self.batch_size = source, modifiers, spec, batch_size
        self.blocks, self.plan = plan_of(source.model, modifiers)
        calibrate_all_experts(source.model, spec.moe_calibrate_all_experts)

    def run(
        self,
        output_dir: Path | None,
        resume: bool,
        say: Callable[[str], object] = lambda line: None,
        beside: Mapping[str, Any] | None = None,
    ) -> CompressionResult:
        """Compress, and write to `output_dir` if that is given; `say` is told what it will need before it begins.

        The report has the entries of `beside` as well.
        """
        if resume and output_dir is None:
            raise UserError("resume needs the output_dir of the interrupted run", param="resume")
        started = time.perf_counter()
        torch.manual_seed(self.spec.seed)
        if output_dir is not None:
            self._check_folder(output_dir)
        lacks = self.source.lacks_tokenizer()
        if lacks:
            self.plan.notes.append(f"no tokenizer is written: {lacks}")
        data = self._calibration(lacks)
        fingerprint = self._fingerprint(data)
        if resume and output_dir is not None and (finished := _finished(output_dir, fingerprint)) is not None:
            remove_work(output_dir)
            self._restore(output_dir)
            return CompressionResult(output_dir, finished)
        keep = self._keep(data)
        begun = begun_with(output_dir, _BATCH) if resume and output_dir is not None else None
        batches, needs = self._batches_that_fit(data, keep, None if begun is None else int(begun))
        check(needs, self.source, output_dir)
        say(needs.line())
        batch = {_BATCH: str(len(batches[0]) if batches else 0)}
        folder = None if output_dir is None else WorkFolder(output_dir, fingerprint | batch, resume)
        self.plan.notes += survey(self.source, self.blocks, self.plan, batches)
        pipeline = BlockPipeline(self.source, self.blocks, self.plan, batches, keep, self.spec.seed)
        results = self._compress(pipeline, folder, batches)
        report = self._report(data, fingerprint, results, pipeline) | {"estimate": needs.to_report()}
        report |= beside or {}
        if output_dir is None or folder is None:
            attach_save(self.source, self.plan, results, dump_recipe(self.modifiers), pipeline.kv_scales)
        else:
            self._write(folder, output_dir, results, report, started)
        return CompressionResult(output_dir, report)

    def _compress(self, pipeline: BlockPipeline, folder: WorkFolder | None, batches: list[Tensor]) -> list[LayerResult]:
        largest = max((batch.numel() for batch in batches), default=0) * self._inner() * 4
        with Progress(len(self.blocks.modules), "compressing", unit="blocks") as progress, reused_buffers(largest):
            before = 0 if folder is None else folder.count()  # by an interrupted run
            progress.update(before, note="starting")
            return pipeline.run(folder, lambda done, note: progress.update(max(done, before), note=note))

    def _write(
        self, folder: WorkFolder, output_dir: Path, results: list[LayerResult], report: dict[str, Any], started: float
    ) -> None:
        """The checkpoint and its report, all of it or nothing."""
        writing = time.perf_counter()
        with folder.checkpoint() as directory:
            sizes = write_checkpoint(self.source, self.blocks, self.plan, folder, directory)
            (directory / RECIPE).write_text(report["recipe"], encoding="utf-8")
            report["size"] = self._sizes(sizes, results)
            seconds = report["seconds"]
            seconds["write"] = seconds.get("write", 0.0) + time.perf_counter() - writing
            seconds["total"] = time.perf_counter() - started
            report["peak_memory_bytes"] = peak_memory()
            write_json(directory / REPORT, report)
        folder.publish(last=CONFIG)
        attach_copy(self.source, output_dir)

    def _check_folder(self, output_dir: Path) -> None:
        if self.source.path is not None and output_dir.resolve() == self.source.path.resolve():
            raise UserError(f"output_dir {output_dir} is the model itself; name another folder", param="output_dir")
        output_folder(output_dir)

    @torch.no_grad()
    def _restore(self, output_dir: Path) -> None:
        """Give the model that stays in memory the weights of the finished checkpoint."""
        if not self.source.keep:
            return
        self.source.fill(self.source.model, "")
        checkpoint = open_checkpoint(output_dir)
        modules = dict(self.source.model.named_modules())
        for name, module in modules.items():
            for leaf, value in module.named_parameters(recurse=False):
                if (full := f"{name}.{leaf}") in checkpoint:
                    value.copy_(checkpoint.tensor(full))
        self.source.release(self.source.model, "")
        attach_copy(self.source, output_dir)

    def _calibration(self, lacks_tokenizer: str | None) -> CalibrationData | None:
        if not self.plan.needs_data():
            return None
        spec = self.spec.within(getattr(self.source.model.config.get_text_config(), "max_position_embeddings", None))
        if lacks_tokenizer is None:
            return load_calibration(spec, self.source.tokenizer)
        try:
            return load_calibration(spec, None)  # token ids need none
        except UserError as error:
            raise UserError(f"{error} ({lacks_tokenizer})", param=error.param) from None

    def _batches_that_fit(
        self, data: CalibrationData | None, keep: Keep, begun: int | None
    ) -> tuple[list[Tensor], Needs]:
        """The batches and what they need: as large as they may be, smaller ones where memory is short.

        The results depend on them, so a run that is resumed has those that it was begun with.
        """
        sizes = [begun] if begun else self._batch_sizes(data)
        for size in sizes:
            batches = [] if data is None else _batches(data, size)
            needs = estimate(self.source, self.blocks, self.plan, batches, keep)
            if fits(needs, self.source):
                break
        if size != sizes[0]:
            self.plan.notes.append(f"memory is short: batches of {size} sequences instead of {sizes[0]}")
        return batches, needs

    def _batch_sizes(self, data: CalibrationData | None) -> list[int]:
        """Sequences a batch: what was asked for, or from the fastest to the one that takes the least memory."""
        if data is None or self.batch_size is not None or not data.alike:
            return [self.batch_size or 1]
        some = max(1, _BATCH_TOKENS[self.source.device.type] // data.samples[0].shape[1])
        sizes = [len(data.samples), some, 1] if self._fits(data.tokens) else [some, 1]
        return [size for index, size in enumerate(sizes) if size < min(sizes[:index], default=size + 1)]

    def _fits(self, tokens: int) -> bool:
        hidden = self.source.model.config.get_text_config().hidden_size
        return tokens * (6 * hidden + 4 * self._inner()) * self.source.compute_dtype.itemsize <= _ONE_BATCH_BYTES

    def _inner(self) -> int:
        config = self.source.model.config.get_text_config()
        return getattr(config, "intermediate_size", None) or 4 * config.hidden_size

    def _keep(self, data: CalibrationData | None) -> Keep:
        """Where the blocks' inputs wait: in 16 bits, as the model itself has them, where float32 would take much."""
        source = self.source
        values = (0 if data is None else data.tokens) * source.model.config.get_text_config().hidden_size
        short = source.dtype.itemsize == 2 and values * source.compute_dtype.itemsize > _MUCH
        dtype = source.dtype if short else source.compute_dtype
        if source.device.type == "cpu":
            return Keep(source.device, dtype, twice=not short)
        room = free_device_memory(source.device) // 2
        on_device = values * dtype.itemsize < room
        return Keep(source.device if on_device else torch.device("cpu"), dtype, 2 * values * dtype.itemsize < room)

    def _fingerprint(self, data: CalibrationData | None) -> dict[str, str]:
        config = json.dumps(self.source.config_dict(), sort_keys=True, default=str)
        dtype = next(self.source.model.parameters()).dtype
        return {
            "model": f"{self.source.name} {hashlib.sha256(config.encode()).hexdigest()[:16]}",
            "recipe": dump_recipe(self.modifiers),
            "calibration data": "none" if data is None else data.digest(),
            "batch size": str(self.batch_size),
            "experts": "all tokens" if self.spec.moe_calibrate_all_experts else "their tokens",
            "all experts": str(self.spec.moe_calibrate_all_experts),
            "seed": str(self.spec.seed),
            "precision": str(dtype),
            "device": self.source.device.type,
        }

    def _report(
        self,
        data: CalibrationData | None,
        fingerprint: dict[str, str],
        results: list[LayerResult],
        pipeline: BlockPipeline,
    ) -> dict[str, Any]:
        seconds = pipeline.phases.seconds
        notes = self.source.notes + self.plan.notes + ([] if data is None else data.notes) + pipeline.notes
        calibration = None
        if data is not None:
            calibration = {"source": data.source, "sequences": len(data.samples), "tokens": data.tokens}
        kinds = sorted({result.details["algorithm"] for result in results if "algorithm" in result.details})
        return {
            "model": self.source.name,
            "algorithm": "+".join(kinds),
            "recipe": dump_recipe(self.modifiers),
            "calibration": calibration,
            "layers": [layer_entry(result) for result in results],
            "worst_layers": [result.name for result in sorted(results, key=lambda result: -result.error)[:5]],
            "mean_error": sum(result.error for result in results) / max(len(results), 1),
            "notes": notes + [note for result in results for note in result.notes],
            "seconds": {"total": sum(seconds.values())} | seconds,
            "peak_memory_bytes": peak_memory(),
            "peak_device_memory_bytes": peak_device_memory(self.source.device),
            "environment": environment(),
            "fingerprint": fingerprint,
        }

    def _sizes(self, sizes: dict[str, tuple[int, int]], results: list[LayerResult]) -> dict[str, Any]:
        names = {id(module): name for name, module in self.source.model.named_modules()}
        embedding = names.get(id(self.source.model.get_input_embeddings()), "")
        output = names.get(id(self.source.model.get_output_embeddings()), "")
        return size_report(sizes, results, embedding, output, self.source.dtype.itemsize)


def _batches(data: CalibrationData, size: int) -> list[Tensor]:
    """int64 [at most size, T] each; sequences of several lengths are batches of their own."""
    samples = data.samples
    if not data.alike:
        return samples
    return [torch.cat(samples[start : start + size]) for start in range(0, len(samples), size)]


def _finished(output_dir: Path, fingerprint: dict[str, str]) -> dict[str, Any] | None:
    """The report of a run that was finished and is the same, else None."""
    path = output_dir / REPORT
    if not path.is_file() or not (output_dir / CONFIG).is_file():
        return None
    report = json.loads(path.read_text(encoding="utf-8"))
    return report if report.get("fingerprint") == fingerprint else None


def peak_memory() -> int:
    """The most memory that this process has held, in bytes."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    for line in lines:
        if line.startswith("VmHWM:"):  # getrusage also counts what the process was before it became this program
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
