"""Mixed precision by measured sensitivity: `--target-size` and `--max-perplexity-increase`.

The sensitivity of each layer is measured (sensitivity.py), widths are chosen (bit_allocation.py), and the recipe's
quantizer goes on with those as its config_groups, so recipe.yaml says what was chosen. For a size that is all. For a
limit on perplexity, sizes are tried until one is near it: each trial is a whole compression, whose perplexity is
measured on windows of the calibration text that were held out.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.writer import write_json
from octavo.compress.assignment import Plan, make_plan
from octavo.compress.bit_allocation import Target, Widths, allocate, least_budget, predicted_loss, total_size
from octavo.compress.blocks import find_blocks
from octavo.compress.calibration import CalibrationData, CalibrationSpec, load_calibration
from octavo.compress.checkpoint_source import CheckpointSource
from octavo.compress.export import CONFIG, REPORT
from octavo.compress.job import CompressionJob, CompressionResult
from octavo.compress.model_source import ModelSource
from octavo.compress.modifiers.base import Modifier
from octavo.compress.modifiers.quantization import QuantizationModifier
from octavo.compress.recipe import dump_recipe
from octavo.compress.sensitivity import Unit, mean_loss, measure
from octavo.compress.work_folder import FOLDER, publish
from octavo.errors import UserError
from octavo.progress import Progress

Say = Callable[[str], object]
_MEASURED_TOKENS = 4096  # sensitivities hardly change with more
_HELD_OUT = 8  # one of so many sequences
_TRIALS = 5
_NEAR = 0.85  # of the limit: the search ends


@dataclass
class MixedPrecision:
    """What to compress, and the measured units of it. `make_source` opens the model anew."""

    make_source: Callable[[], ModelSource]
    modifiers: list[Modifier]
    spec: CalibrationSpec
    widths: tuple[int, ...]
    batch_size: int | None = None

    def __post_init__(self) -> None:
        self.quantizer = _only_quantizer(self.modifiers)
        self.source = self.make_source()
        self.blocks = find_blocks(self.source.model)
        self.plan = make_plan(self.source.model, self.blocks, [self.quantizer])
        _refuse_formats(self.plan)
        config = self.source.model.config.get_text_config()
        spec = self.spec.within(getattr(config, "max_position_embeddings", None))
        self.data = load_calibration(spec, self.source.tokenizer)
        self.units: list[Unit] = []

    def measure(self) -> None:
        """Fill `units`."""
        torch.manual_seed(self.spec.seed)
        samples, count = [], 0
        for sample in self.data.samples:
            if count < _MEASURED_TOKENS:
                samples.append(sample)
                count += sample.numel()
        with Progress(len(self.blocks.modules), "measuring sensitivities", unit="blocks") as progress:
            self.units = measure(
                self.source, self.blocks, self.plan, samples, self.widths,
                lambda done, note: progress.update(done, note=note),
            )  # fmt: skip

    def budget(self, target: Target) -> int:
        """Bytes that a target size leaves for the quantized layers."""
        dense = total_size(self.units, [None] * len(self.units))
        original = _original_bytes(self.source)
        return target.budget(original - dense + self._header(), original, dense // self.source.dtype.itemsize)

    def _header(self) -> int:
        """About what names and places of tensors take in the file."""
        return 130 * (3 * sum(len(unit.names) for unit in self.units) + len(list(self.source.model.parameters())))

    def request(self) -> dict[str, Any]:
        """What was asked for, to know it again."""
        return {
            "model": self.source.name, "recipe": dump_recipe(self.modifiers), "bit_choices": list(self.widths),
            "calibration data": self.data.digest(), "seed": self.spec.seed, "batch size": self.batch_size,
        }  # fmt: skip

    def recipe(self, widths: Widths) -> list[Modifier]:
        """The modifiers, with the chosen widths in the place of the quantizer's scheme."""
        return [self._chosen(widths) if m is self.quantizer else m for m in self.modifiers]

    def _chosen(self, widths: Widths) -> QuantizationModifier:
        groups: dict[str, Any] = {}
        ignore = list(self.plan.dense)
        for unit, width in zip(self.units, widths, strict=True):
            for name in unit.names:
                scheme = self.plan.layers[name].scheme
                assert scheme is not None
                if width is None:
                    ignore.append(name)
                    continue
                key = f"bits_{width}_group_{scheme.group_size or -1}" + ("" if scheme.symmetric else "_asym")
                weights = {"num_bits": width, "type": "int", "symmetric": scheme.symmetric,
                           "strategy": scheme.strategy, "group_size": scheme.group_size}  # fmt: skip
                groups.setdefault(key, {"targets": [], "weights": weights})["targets"].append(name)
        if not groups:
            raise UserError(
                "no layer would be quantized at all: the target is as large as the model", param="target_size"
            )
        kept = {k: v for k, v in self.quantizer.to_recipe().items() if k not in _REPLACED}
        return type(self.quantizer)(**kept, config_groups=groups, ignore=ignore)

    def describe(self, widths: Widths) -> dict[str, Any]:
        """For the report: how often each width was chosen, the predicted loss, and every layer's sensitivity."""
        counts: dict[str, int] = {}
        for unit, width in zip(self.units, widths, strict=True):
            key = "unquantized" if width is None else f"{width} bits"
            counts[key] = counts.get(key, 0) + len(unit.names)
        layers = [
            {"layers": list(unit.names), "bits": width,
             "predicted_loss": {str(w or 16): loss for w, loss in unit.loss.items()}}
            for unit, width in zip(self.units, widths, strict=True)
        ]  # fmt: skip
        return {
            "layers_by_width": dict(sorted(counts.items())), "predicted_loss": predicted_loss(self.units, widths),
            "bytes_of_layers": total_size(self.units, widths), "sensitivities": layers,
        }  # fmt: skip


def for_size(mixed: MixedPrecision, target: Target, output_dir: Path, resume: bool, say: Say) -> CompressionResult:
    """Compress to a size."""
    mixed.measure()
    widths = allocate(mixed.units, mixed.budget(target))
    said = mixed.describe(widths)
    say(_line(said))
    job = CompressionJob(mixed.source, mixed.recipe(widths), mixed.spec, mixed.batch_size)
    return job.run(output_dir, resume, say, {"mixed_precision": said})


def for_perplexity(
    mixed: MixedPrecision, percent: float, output_dir: Path, resume: bool, say: Say
) -> CompressionResult:
    """Compress to the smallest size found whose perplexity on held-out windows rises by at most `percent`."""
    request = mixed.request() | {"max_perplexity_increase": percent}
    if resume and (done := _finished(output_dir, request)) is not None:
        shutil.rmtree(output_dir / TRIALS, ignore_errors=True)
        return CompressionResult(output_dir, done)
    held_out, kept = _hold_out(mixed.data)
    samples = mixed.data.samples
    mixed.data = CalibrationData(kept, mixed.data.source)
    mixed.measure()
    before = mean_loss(mixed.source, mixed.blocks, held_out)
    limit = math.log1p(percent / 100)
    say(f"perplexity before: {math.exp(before):.3f} on {len(held_out)} held-out sequences")
    spec = replace(mixed.spec, dataset=[sample[0].tolist() for sample in kept], concatenate_data=False,
                   shuffle_calibration_samples=False, num_calibration_samples=len(kept))  # fmt: skip
    wanted = limit
    trials: list[dict[str, Any]] = []
    best: tuple[int, Path, CompressionResult, Widths] | None = None
    for number in range(_TRIALS):
        widths = allocate(mixed.units, least_budget(mixed.units, wanted))
        if any(widths == trial["widths"] for trial in trials):
            break
        folder = output_dir / TRIALS / str(number)
        said = mixed.describe(widths)
        job = CompressionJob(mixed.make_source(), mixed.recipe(widths), spec, mixed.batch_size)
        result = job.run(folder, resume, say, {"mixed_precision": said})
        rise = _loss_of(folder, mixed.source, held_out) - before
        size = result.report["size"]["after_bytes"]
        trials.append({"widths": widths, "bytes": size, "perplexity": math.exp(before + rise)})
        say(f"trial {number + 1}: {size / 1e6:.1f} MB, perplexity {math.exp(before + rise):.3f} ({_line(said)})")
        if rise <= limit and (best is None or size < best[0]):
            best = (size, folder, result, widths)
        if _NEAR * limit <= rise <= limit:
            break
        wanted *= min(4.0, max(0.25, 0.95 * limit / max(rise, limit / 100)))
    if best is None:
        raise UserError(
            f"none of {len(trials)} trials kept the perplexity within {percent:g} % (the last rose by "
            f"{100 * math.expm1(math.log(trials[-1]['perplexity']) - before):.2f} %); allow more, or more bits in "
            "--bit-choices",
            param="max_perplexity_increase",
        )
    trial_log = [{key: value for key, value in trial.items() if key != "widths"} for trial in trials]
    about = {"perplexity_before": math.exp(before), "trials": trial_log, "request": request}
    about["held_out"] = f"{len(held_out)} of {len(samples)} sequences of {mixed.data.source}"
    return _publish(best[1], best[2], output_dir, about)


TRIALS = f"{FOLDER}-trials"
_REPLACED = ("scheme", "targets", "ignore", "group_size", "config_groups")


def _finished(output_dir: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """The report of a search for the same that was finished, else None."""
    path = output_dir / REPORT
    if not path.is_file() or not (output_dir / CONFIG).is_file():
        return None
    report = json.loads(path.read_text(encoding="utf-8"))
    return report if report.get("mixed_precision", {}).get("request") == request else None


def _publish(folder: Path, result: CompressionResult, output_dir: Path, about: dict[str, Any]) -> CompressionResult:
    report = result.report
    report["mixed_precision"] |= about
    write_json(folder / REPORT, report)
    publish(folder, output_dir, last=CONFIG)
    shutil.rmtree(output_dir / TRIALS)
    return CompressionResult(output_dir, report)


def _loss_of(folder: Path, source: ModelSource, batches: Sequence[Tensor]) -> float:
    compressed = CheckpointSource(open_checkpoint(folder), str(folder), device=source.device)
    return mean_loss(compressed, find_blocks(compressed.model), batches)


def _hold_out(data: CalibrationData) -> tuple[list[Tensor], list[Tensor]]:
    """Every eighth sequence is held out, from the last one on; the others are kept."""
    samples = data.samples
    if len(samples) < 2:
        raise UserError(
            f"{data.source} gave one calibration sequence; one has to be held out to measure perplexity, so give more "
            "text or a shorter --max-seq-length",
            param="max_perplexity_increase",
        )
    held = set(range(len(samples) - 1, -1, -_HELD_OUT))
    return [samples[i] for i in sorted(held)], [s for i, s in enumerate(samples) if i not in held]


def _only_quantizer(modifiers: list[Modifier]) -> QuantizationModifier:
    found = [modifier for modifier in modifiers if isinstance(modifier, QuantizationModifier)]
    if len(found) != 1:
        raise UserError(
            f"the recipe has {len(found)} quantizing modifiers; choosing bits by layer needs exactly one",
            param="recipe",
        )
    return found[0]


def _refuse_formats(plan: Plan) -> None:
    for name, scheme in plan.schemes().items():
        if scheme.type != "int" or scheme.activations is not None:
            raise UserError(
                f"{name} would get a scheme with {scheme.num_bits}-bit {scheme.type} weights"
                f"{'' if scheme.activations is None else ' and quantized activations'}; bits are chosen for integer "
                "weights alone, as in W4A16",
                param="scheme",
            )


def _original_bytes(source: ModelSource) -> int:
    held = {id(parameter): parameter.numel() for parameter in source.model.parameters()}
    return sum(held.values()) * source.dtype.itemsize


def _line(said: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} with {width}" for width, count in said["layers_by_width"].items())
    return f"layers: {counts}; predicted rise of the loss {said['predicted_loss']:.4f} a token"
