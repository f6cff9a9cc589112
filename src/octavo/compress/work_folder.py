"""What is finished survives a crash: one file a block, until the checkpoint is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.compress.layer_work import restored, rewrite
from octavo.compress.modifiers.base import LayerResult
from octavo.compress.stored_layer import layer_parameters, read_layer
from octavo.errors import UserError

FOLDER = ".octavo-partial"


@dataclass
class StoredBlock:
    """A finished block: its layers' results (codes and all), what its transforms said, and its other tensors."""

    results: list[LayerResult]
    notes: list[str]
    dense: dict[str, Tensor]

    @torch.no_grad()
    def restore(self, block: nn.Module, prefix: str) -> None:
        """Give `block` (full name `prefix`), which is filled, the weights that it had when it was finished."""
        for name, tensor in self.dense.items():
            path, _, leaf = name.removeprefix(f"{prefix}.").rpartition(".")
            getattr(block.get_submodule(path), leaf).copy_(tensor)
        for result in self.results:
            if result.codes is not None:
                layer: Any = block.get_submodule(result.name.removeprefix(f"{prefix}."))
                rewrite(layer, restored(result))


class WorkFolder:
    """Blocks that are done, below the output directory.

    `fingerprint` says what the blocks were made from (model, recipe, calibration data, seed). With `resume`, a folder
    of another fingerprint is refused with the differences; without, whatever is there is removed.
    """

    def __init__(self, output_dir: Path, fingerprint: dict[str, str], resume: bool) -> None:
        self.path = output_dir / FOLDER
        state = self.path / "state.json"
        if state.is_file() and resume:
            _check_same(json.loads(state.read_text(encoding="utf-8")), fingerprint, output_dir)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
            _write_whole(state, json.dumps(fingerprint, indent=2))

    def _file(self, index: int) -> Path:
        return self.path / f"block-{index:05d}.safetensors"

    def save(self, index: int, results: list[LayerResult], tensors: dict[str, Tensor], notes: list[str]) -> None:
        """Write a block: the layers that were quantized as such, its other `tensors` as they are.

        It is there as a whole or not at all.
        """
        stored = dict(tensors)
        for result in results:
            if result.codes is not None:
                del stored[f"{result.name}.weight"]
                stored |= layer_parameters(result)
        about = {"layers": json.dumps([_entry(result) for result in results]), "notes": json.dumps(notes)}
        part = self._file(index).with_suffix(".part")
        contiguous = {name: tensor.contiguous() for name, tensor in stored.items()}
        try:
            save_file(contiguous, part, metadata=about)
            os.replace(part, self._file(index))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{part} cannot be written ({error}); free some space and go on with --resume, nothing else is lost"
            ) from error

    def load(self, index: int) -> StoredBlock | None:
        """A block that is done, else None."""
        if not self._file(index).is_file():
            return None
        with safe_open(self._file(index), framework="pt") as file:
            about = file.metadata()
            entries = json.loads(about["layers"])
            results = [_result(file, entry) for entry in entries]
            layers = {result.name for result in results if result.codes is not None}
            dense = {n: file.get_tensor(n) for n in file.keys() if _is_dense(n, layers)}  # noqa: SIM118 - not a dict
            return StoredBlock(results, json.loads(about["notes"]), dense)

    def tensors(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """All tensors of a block, as the checkpoint holds them."""
        with safe_open(self._file(index), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)

    def remove(self) -> None:
        """The checkpoint is whole."""
        shutil.rmtree(self.path)


def _is_dense(name: str, layers: set[str]) -> bool:
    module, _, leaf = name.rpartition(".")
    return module not in layers or leaf == "bias"


def _entry(result: LayerResult) -> dict[str, Any]:
    entry = {"name": result.name, "shape": list(result.shape), "error": result.error, "details": result.details}
    scheme = None if result.codes is None or result.scheme is None else _scheme_fields(result.scheme)
    return entry | {"notes": result.notes, "scheme": scheme, "dtype": str(result.scale_dtype).removeprefix("torch.")}


def _scheme_fields(scheme: WeightScheme) -> dict[str, Any]:
    activations = None if scheme.activations is None else vars(scheme.activations)
    return vars(scheme) | {"activations": activations}


def _result(file: Any, entry: dict[str, Any]) -> LayerResult:
    rows, columns = entry["shape"]
    dtype = getattr(torch, entry["dtype"])
    scheme, codes, grid, input_scale = None, None, None, None
    if entry["scheme"] is not None:
        fields = dict(entry["scheme"])
        activations, block = fields.pop("activations"), fields.pop("block_structure")
        scheme = WeightScheme(
            **fields,
            activations=None if activations is None else ActivationScheme(**activations),
            block_structure=None if block is None else tuple(block),
        )
        codes, grid, input_scale = read_layer(file, entry["name"], scheme, (rows, columns))
    return LayerResult(
        entry["name"], (rows, columns), scheme, codes, grid, dtype, entry["error"], entry["details"], entry["notes"],
        input_scale,
    )  # fmt: skip


def _check_same(found: dict[str, str], wanted: dict[str, str], output_dir: Path) -> None:
    different = [key for key in wanted if found.get(key) != wanted[key]]
    if different:
        raise UserError(
            f"{output_dir} holds a compression that was begun with another {' and '.join(different)}; "
            "resume with the same, or start anew without resume"
        )


def _write_whole(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
