"""What a compression will need, before it begins: memory at its fullest moment, and room on the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from octavo.compress.assignment import Plan
from octavo.compress.blocks import Blocks, siblings
from octavo.compress.export import SHARD_BYTES
from octavo.compress.model_source import ModelSource
from octavo.compress.modifiers.gptq import SOLVED_AT_ONCE
from octavo.compress.walker import Keep
from octavo.compress.work_folder import FOLDER
from octavo.errors import CapacityError
from octavo.ops.device import free_device_memory
from octavo.units import size as in_words

Parts = dict[str, int]  # bytes by what they are for


@dataclass(frozen=True)
class Needs:
    """Bytes at the fullest moment by part, in the host's memory and, where blocks run on one, in a GPU's; and what is
    written to the disk, all files of the run together, of which the checkpoint is half."""

    host: Parts
    device: Parts
    disk: int

    def to_report(self) -> dict[str, Any]:
        """For compression_report.json."""
        return {"host": self.host, "device": self.device, "disk_bytes": self.disk}

    def line(self) -> str:
        """For people."""
        places = [("memory", self.host), ("GPU memory", self.device)]
        said = [
            f"{place}: about {in_words(sum(parts.values()))} "
            f"({', '.join(f'{name} {in_words(part)}' for name, part in parts.items() if part)})"
            for place, parts in places
            if parts
        ]
        return "; ".join([*said, f"disk: about {in_words(self.disk)} until the end, {in_words(self.disk // 2)} then"])


def estimate(source: ModelSource, blocks: Blocks, plan: Plan, batches: list[Tensor], keep: Keep) -> Needs:
    """The needs of a pipeline over `batches` (int64 [B, T]) whose blocks' inputs wait as `keep` says."""
    width = source.compute_dtype.itemsize
    block = max(_elements(module) for module in blocks.modules)
    outside = _elements(source.model) - sum(_elements(module) for module in blocks.modules)
    output_layer = source.model.get_output_embeddings()
    if output_layer is not None and not plan.transforms and not _is_tied(source):
        outside -= _elements(output_layer)  # not read before the end
    needs_outside = bool(batches) or bool(plan.transforms)
    hidden = source.model.config.get_text_config().hidden_size
    waiting = sum(batch.numel() for batch in batches) * hidden * (keep.dtype or source.compute_dtype).itemsize
    aligned = keep.twice and any("drift" in assignment.statistics for assignment in plan.layers.values())
    waiting *= 1 + aligned
    output = _stored_bytes(source, blocks, plan)
    in_work: Parts = {"a block": block * (width + 1)}  # the codes too
    if batches:
        largest = max(batch.numel() for batch in batches)
        forward = largest * (6 * hidden + 4 * (_inner(source) or 4 * hidden)) * width
        in_work |= {"statistics": _statistics(blocks, plan, len(batches) == 1) * (1 + aligned)}
        if aligned and len(batches) > 1:
            in_work |= {"the block as it was": block * width}
        in_work |= {"in work": max(forward, _solving(blocks, plan, source.device.type == "cpu"))}
    else:
        in_work |= {"in work": _solving(blocks, plan, source.device.type == "cpu")}
    start: Parts = {"embeddings": outside * (width + source.dtype.itemsize) * needs_outside}
    writing: Parts = {"a shard": min(SHARD_BYTES, output)}
    kept = {"model": _elements(source.model) * width} if source.keep else {}
    base = {"program": resident_memory()}
    if source.device.type == "cpu":
        moments = (start | {"activations": waiting}, in_work | {"activations": waiting}, writing)
        return Needs(base | kept | _fullest(moments), {}, 2 * output)
    on_device = keep.device.type != "cpu"
    device = _fullest((start, in_work)) | {"activations": waiting * on_device}
    ahead = {"blocks read ahead": 2 * block * source.dtype.itemsize, "activations": waiting * (not on_device)}
    return Needs(base | kept | _fullest((ahead, writing)), device, 2 * output)


def check(needs: Needs, source: ModelSource, output_dir: Path | None) -> None:
    """CapacityError, with the numbers and the way out, where memory or disk will not do."""
    _compare("memory", needs.host, free_memory())
    if needs.device:
        _compare("GPU memory", needs.device, free_device_memory(source.device))
    if output_dir is not None:
        free = shutil.disk_usage(output_dir).free + sum(
            path.stat().st_size for path in (output_dir / FOLDER).rglob("*") if path.is_file()
        )
        if needs.disk > free:
            raise CapacityError(
                f"compressing takes about {in_words(needs.disk)} on the disk of {output_dir}, half of it until the end "
                f"only, but {in_words(free)} are free; free some space or name another --output-dir"
            )


def _compare(place: str, parts: Parts, free: int) -> None:
    program = parts.get("program", 0)
    needed = sum(parts.values()) - program
    if needed <= free:
        return
    ways = [
        "fewer or shorter calibration samples (--num-calibration-samples, --max-seq-length)",
        "a smaller batch_size",
    ]
    said = ", ".join(f"{name} {in_words(part)}" for name, part in parts.items() if part and name != "program")
    raise CapacityError(
        f"compressing takes about {in_words(needed)} of {place} ({said}), but {in_words(free)} are free; "
        f"use {' or '.join(ways)}"
    )


def _fullest(moments: tuple[Parts, ...]) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_tied(source: ModelSource) -> bool:
    return source.model.get_output_embeddings().weight is source.model.get_input_embeddings().weight


def _inner(source: ModelSource) -> int:
    return int(getattr(source.model.config.get_text_config(), "intermediate_size", None) or 0)


def _groups(blocks: Blocks, plan: Plan, index: int) -> list[list[tuple[str, nn.Linear]]]:
    layers = {name: module for name, module in blocks.linears(index) if name in plan.layers}
    return [[(name, layers[name]) for name in group] for group in siblings(layers)]


def _over_blocks(blocks: Blocks, count: Callable[[int], int]) -> int:
    return max(count(index) for index in range(len(blocks.modules)))


def _statistics(blocks: Blocks, plan: Plan, one_pass: bool) -> int:
    """Of all layers of a block; in one pass, of those that read one input."""

    def of_block(index: int) -> int:
        sizes = [
            group[0][1].in_features ** 2 * 4 if "hessian" in plan.layers[group[0][0]].statistics else 0
            for group in _groups(blocks, plan, index)
        ]
        return max(sizes, default=0) if one_pass else sum(sizes)

    return _over_blocks(blocks, of_block)


def _solving(blocks: Blocks, plan: Plan, one_by_one: bool) -> int:
    """Of the layers in hand, six float32 copies (aim, work, levels, errors, and on the way), beside the factor of their
    Hessian, which takes two matrices while it is made."""

    def of_group(group: list[tuple[str, nn.Linear]]) -> int:
        counts = [module.weight.numel() for _, module in group]
        weights = min(sum(counts), max(SOLVED_AT_ONCE, *counts)) if one_by_one else sum(counts)
        square = group[0][1].in_features ** 2 if "hessian" in plan.layers[group[0][0]].statistics else 0
        return 4 * max(2 * square, square + 6 * weights)

    return _over_blocks(blocks, lambda index: max(map(of_group, _groups(blocks, plan, index)), default=0))


def _stored_bytes(source: ModelSource, blocks: Blocks, plan: Plan) -> int:
    """About the size of the checkpoint."""
    schemes = plan.schemes()
    tied = {id(parameter): parameter.numel() for parameter in source.model.parameters()}
    total = sum(tied.values()) * source.dtype.itemsize
    for index in range(len(blocks.modules)):
        for name, module in blocks.linears(index):
            if (scheme := schemes.get(name)) is not None:
                bits = scheme.num_bits * module.weight.numel()
                bits += 16 * module.out_features * scheme.num_groups(module.in_features)
                total += bits // 8 - module.weight.numel() * source.dtype.itemsize
    return total


def resident_memory() -> int:
    """What this process takes now."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Memory that this process can still get: of the machine, or of its control group where that is less."""
    info = Path("/proc/meminfo")
    if info.is_file():
        fields = dict(line.split(":") for line in info.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return free
