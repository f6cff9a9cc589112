"""What a compression will need, before it begins: memory at its fullest moment, and room on the disk."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from octavo.compress.assignment import Plan
from octavo.compress.blocks import Blocks, siblings
from octavo.compress.exact_stream import SHARE
from octavo.compress.export import SHARD_BYTES
from octavo.compress.model_source import ModelSource
from octavo.compress.modifiers.gptq import SOLVED_AT_ONCE
from octavo.compress.walker import Keep
from octavo.compress.watching import Group, in_stages
from octavo.compress.work_folder import FOLDER
from octavo.errors import CapacityError
from octavo.ops.device import free_device_memory
from octavo.units import size as in_words

_COPIED_VALUES = 1 << 26  # of the inputs of a layer that are copied at once for their statistics

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
    work = _Work(source, blocks, plan, batches, keep)
    hidden = source.model.config.get_text_config().hidden_size
    waiting = sum(batch.numel() for batch in batches) * hidden * (keep.dtype or source.compute_dtype).itemsize
    waiting += waiting // SHARE * work.aligned
    start, in_work = work.start(), [work.transforming(), work.passes(), *work.solving()]
    output = _stored_bytes(source, blocks, plan)
    writing: Parts = {"a shard": min(SHARD_BYTES, output), "a tensor on its way": work.largest_stored}
    kept = {"model": _elements(source.model) * work.width} if source.keep else {}
    base = {"program": resident_memory()}
    if source.device.type == "cpu":
        busy = [parts | {"activations": waiting} for parts in (start, *in_work)]
        return Needs(base | kept | _fullest([work.reading(), *busy, writing]), {}, 2 * output)
    on_device = keep.device.type != "cpu"
    device = _fullest([work.reading(), start, *in_work]) | {"activations": waiting * on_device}
    ahead = {"blocks read ahead": 2 * work.block * source.dtype.itemsize, "activations": waiting * (not on_device)}
    return Needs(base | kept | _fullest([ahead, writing]), device, 2 * output)


class _Work:
    """What is held at the moments of a compression, beside the activations that wait. Sizes are in bytes, `block` is
    the elements of the largest."""

    def __init__(self, source: ModelSource, blocks: Blocks, plan: Plan, batches: list[Tensor], keep: Keep) -> None:
        self.source, self.blocks, self.plan, self.batches = source, blocks, plan, batches
        self.width = source.compute_dtype.itemsize
        self.block = max(_elements(module) for module in blocks.modules)
        self.aligned = keep.twice and any("drift" in assignment.statistics for assignment in plan.layers.values())
        self.one_pass = len(batches) == 1
        inside = {id(parameter) for module in blocks.modules for parameter in module.parameters()}
        output = source.model.get_output_embeddings()
        outside = [parameter for parameter in source.model.parameters() if id(parameter) not in inside]
        self.largest_stored = max((p.numel() for p in outside), default=0) * source.dtype.itemsize
        if output is not None and not plan.transforms and not _is_tied(source):
            outside = [parameter for parameter in outside if parameter is not output.weight]  # not read before the end
        self._outside = sum(p.numel() for p in outside) if batches or plan.transforms else 0

    def reading(self) -> Parts:
        """What lies outside the blocks is read, a tensor at a time: it is mapped, and copied if its dtype changes."""
        changes = self.source.dtype != self.source.compute_dtype and self._outside > 0
        return {"embeddings": self._outside * self.width, "a tensor on its way": self.largest_stored * changes}

    def start(self) -> Parts:
        """The embeddings make the inputs of the first block, which is there for a trial."""
        if not self.batches:
            return {}
        return {"embeddings": self._outside * self.width, "a block": self.block * self.width}

    def transforming(self) -> Parts:
        """Transforms look at inputs of a block all at once, and try changes on layers that read the same."""
        most = max(map(self._watched, range(len(self.blocks.modules)))) if self.batches else 0
        if not most:
            return {}
        groups = [group for index in range(len(self.blocks.modules)) for group in self._groups(index)]
        weights = max((sum(module.weight.numel() for module in group.values()) for group in groups), default=0)
        return self._block(0) | {"statistics": most, "in work": max(self._forward(), 3 * 4 * weights)}

    def _watched(self, index: int) -> int:
        """Hessians that transforms ask for."""
        layers = dict(self.blocks.linears(index))
        wanted = [pair for transform in self.plan.transforms for pair in transform.watch(index).items()]
        return 4 * sum(layers[name].in_features ** 2 for name, kinds in wanted if "hessian" in kinds)

    def passes(self) -> Parts:
        """Batches run through a block, and what its layers are to know of their inputs is summed up."""
        if not self.batches:
            return {}
        stages = [stage for index in range(len(self.blocks.modules)) for stage in self._stages(index)]
        most = max(map(self._hessians, stages), default=0)
        return self._block(0) | {"statistics": most, "in work": self._forward()}

    def solving(self) -> list[Parts]:
        """Each group of layers is solved, while the statistics of those to come wait, and the codes of those before."""
        found, around = [], self._forward() if self.one_pass else 0
        for index in range(len(self.blocks.modules)):
            done = 0
            for stage in self._stages(index):
                for number, group in enumerate(stage):
                    statistics, solver = self._hessians(stage[number:]), self._solver(group)
                    found.append(self._block(done) | {"statistics": statistics, "in work": solver + around})
                    done += sum(module.weight.numel() for module in group.values())
        return found

    def _block(self, codes: int) -> Parts:
        before = {"the block as it was": self.block * self.width} if self.aligned and len(self.batches) > 1 else {}
        return {"a block": self.block * self.width + codes} | before

    def _stages(self, index: int) -> list[list[Group]]:
        """Groups whose statistics are held together: those of a block, or of a stage of it, or one at a time."""
        groups = self._groups(index)
        if self.one_pass:
            return [[group] for group in groups]
        return in_stages(groups) if self.aligned else [groups]

    def _groups(self, index: int) -> list[Group]:
        layers = {name: module for name, module in self.blocks.linears(index) if name in self.plan.layers}
        return [{name: layers[name] for name in names} for names in siblings(layers)]

    def _sees(self, group: Group, kind: str) -> bool:
        return kind in self.plan.layers[next(iter(group))].statistics

    def _hessians(self, groups: list[Group]) -> int:
        """With the drift, and the squares of the tokens that it is known of."""
        squares = [_inputs(group) ** 2 * (1 + 2 * self.aligned) for group in groups if self._sees(group, "hessian")]
        return 4 * sum(squares)

    def _forward(self) -> int:
        """A batch on its way through a block: its values beside the widest layer, copies of them for the statistics,
        and attention's scores where they are not made piece by piece."""
        config = self.source.model.config.get_text_config()
        tokens, length = max((batch.numel(), batch.shape[1]) for batch in self.batches)
        inner = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
        values = tokens * (6 * config.hidden_size + 4 * inner) * self.width
        sums = any("hessian" in assignment.statistics for assignment in self.plan.layers.values())
        copies = 8 * min(tokens * inner, _COPIED_VALUES) * sums
        eager = getattr(config, "_attn_implementation", None) == "eager"
        return values + copies + tokens * length * config.num_attention_heads * (self.width + 4) * eager

    def _solver(self, group: Group) -> int:
        """In float32: the weights; beside the factor of their Hessian, which takes two matrices while it is made, a few
        copies (aim, work, levels, errors, and on the way to codes) of those that are solved at once; and what drift
        takes on its way to an aim of its own."""
        counts, on_cpu = [module.weight.numel() for module in group.values()], self.source.device.type == "cpu"
        weights = min(sum(counts), max(SOLVED_AT_ONCE, *counts)) if on_cpu else sum(counts)
        square = _inputs(group) ** 2 * self._sees(group, "hessian")
        drifts = self.aligned and self._sees(group, "drift")
        on_the_way = (2 * square + 3 * min(square, weights)) * drifts
        rounding = square + int(((4.75 if on_cpu else 6) + drifts) * weights)
        return 4 * (max(2 * square + weights * drifts, on_the_way, rounding) + sum(counts) * (self.width != 4))


def _inputs(group: Group) -> int:
    return next(iter(group.values())).in_features


def fits(needs: Needs, source: ModelSource) -> bool:
    """Whether there is memory enough."""
    on_device = not needs.device or _beyond(needs.device) <= free_device_memory(source.device)
    return on_device and _beyond(needs.host) <= free_memory()


def _beyond(parts: Parts) -> int:
    """Bytes that are not taken yet."""
    return sum(parts.values()) - parts.get("program", 0)


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
    needed = _beyond(parts)
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


def _fullest(moments: list[Parts]) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_tied(source: ModelSource) -> bool:
    return source.model.get_output_embeddings().weight is source.model.get_input_embeddings().weight


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
