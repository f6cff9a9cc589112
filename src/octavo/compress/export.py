"""The compressed checkpoint: from finished blocks to files that transformers, vLLM and Octavo load."""

from __future__ import annotations

import re
import shutil
import types
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.checkpoint.safetensors_checkpoint import read_json
from octavo.checkpoint.scheme import WeightScheme
from octavo.checkpoint.transforms import refuse_online_transforms
from octavo.checkpoint.writer import (
    CompressedGroup,
    ShardWriter,
    compressed_tensors_config,
    write_json,
)
from octavo.compress.assignment import Plan
from octavo.compress.blocks import Blocks
from octavo.compress.model_source import ModelSource
from octavo.compress.modifiers.base import LayerResult
from octavo.compress.stored_layer import layer_parameters
from octavo.compress.work_folder import WorkFolder

REPORT = "compression_report.json"
RECIPE = "recipe.yaml"
CONFIG = "config.json"
SHARD_BYTES = 2_000_000_000  # held in memory while it is gathered


def quantization_config(plan: Plan) -> dict[str, Any]:
    """config.json's quantization_config for a plan.

    One scheme is said of all Linear modules; several by the last parts of the names where these tell the schemes apart
    ("mlp.down_proj"), else by full names.
    """
    by_scheme: dict[WeightScheme, list[str]] = {}
    for name, scheme in plan.schemes().items():
        by_scheme.setdefault(scheme, []).append(name)
    if len(by_scheme) == 1:
        groups = [CompressedGroup(scheme) for scheme in by_scheme]
    else:
        endings = [{_ending(name) for name in names} for names in by_scheme.values()]
        distinct = sum(map(len, endings)) == len(set().union(*endings))
        groups = [
            CompressedGroup(
                scheme, tuple(f"re:.*{re.escape(end)}$" for end in sorted(ends)) if distinct else tuple(names)
            )
            for (scheme, names), ends in zip(by_scheme.items(), endings, strict=True)
        ]
    config = compressed_tensors_config(groups, plan.dense, plan.kv_cache_scheme)
    online = {name: group for transform in plan.transforms for name, group in transform.online().items()}
    if not groups:
        config["format"] = "dense"
    return config | {"transform_config": {"config_groups": online}} if online else config


def config_of(source: ModelSource, plan: Plan) -> dict[str, Any]:
    """config.json of the compressed checkpoint: that of a plain one where nothing was quantized or rotated online."""
    config, quantization = source.config_dict(), quantization_config(plan)
    needed = quantization["config_groups"] or quantization["transform_config"]
    return config | {"quantization_config": quantization} if needed else config


def _ending(name: str) -> str:
    """The last two parts of a module's name."""
    return ".".join(name.split(".")[-2:])


def write_checkpoint(
    source: ModelSource, blocks: Blocks, plan: Plan, folder: WorkFolder, directory: Path
) -> dict[str, tuple[int, int]]:
    """Gather the finished blocks and all other tensors into shards; returns (elements, bytes) by tensor name."""
    writer = ShardWriter(directory, SHARD_BYTES)
    sizes: dict[str, tuple[int, int]] = {}
    for name, tensor in chain(_all_tensors(source, blocks, folder), _online_tensors(plan)):
        writer.add(name, tensor)
        sizes[name] = (tensor.numel(), tensor.numel() * tensor.element_size())
        del tensor  # it keeps its file mapped, and the next one may be as large
    writer.close()
    source.save_files(directory)
    write_json(directory / CONFIG, config_of(source, plan))
    return sizes


def _all_tensors(source: ModelSource, blocks: Blocks, folder: WorkFolder) -> Iterator[tuple[str, Tensor]]:
    yield from folder.outside() or source.stored("", (f"{blocks.prefix}.",))
    for index in range(len(blocks.modules)):
        yield from folder.tensors(index)


def _online_tensors(plan: Plan) -> Iterator[tuple[str, Tensor]]:
    return (pair for transform in plan.transforms for pair in transform.tensors().items())


def attach_copy(source: ModelSource, output_dir: Path) -> None:
    """Make `model.save_pretrained(directory)` copy the checkpoint that was written to `output_dir`."""
    original = source.model.save_pretrained

    def save_pretrained(self: Any, save_directory: str | Path, save_compressed: bool = True) -> None:
        if not save_compressed:
            refuse_online_transforms(read_json(output_dir / CONFIG), output_dir, "saving its weights alone")
            original(save_directory)
        elif Path(save_directory).resolve() != output_dir.resolve():
            shutil.copytree(output_dir, save_directory, dirs_exist_ok=True)

    source.model.save_pretrained = types.MethodType(save_pretrained, source.model)


def attach_save(
    source: ModelSource, plan: Plan, results: list[LayerResult], recipe: str, kv_scales: dict[str, Tensor]
) -> None:
    """Make `model.save_pretrained(directory)` write the compressed checkpoint, as it does after LLM Compressor.

    `save_compressed=False` writes the changed weights as they are, unpacked.
    """
    original = source.model.save_pretrained

    def save_pretrained(
        self: Any, save_directory: str | Path, save_compressed: bool = True, max_shard_size: int = SHARD_BYTES
    ) -> None:
        if not save_compressed:
            refuse_online_transforms(config_of(source, plan), Path(save_directory), "saving its weights alone")
            original(save_directory)
            return
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        writer = ShardWriter(directory, max_shard_size)
        layers = {result.name: result for result in results if result.codes is not None}
        for name, tensor in source.stored(""):
            layer = layers.get(name.removesuffix(".weight"))
            whole = layer is None or not name.endswith(".weight")
            for stored_name, stored in ({name: tensor} if whole else layer_parameters(layer)).items():  # type: ignore[arg-type]
                writer.add(stored_name, stored)
        for name, tensor in chain(kv_scales.items(), _online_tensors(plan)):
            writer.add(name, tensor)
        writer.close()
        source.save_files(directory)
        write_json(directory / CONFIG, config_of(source, plan))
        (directory / RECIPE).write_text(recipe, encoding="utf-8")

    source.model.save_pretrained = types.MethodType(save_pretrained, source.model)
