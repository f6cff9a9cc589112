"""What is finished survives a crash: one file a block, until the checkpoint is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.checkpoint.safetensors_checkpoint import MAPPED_BYTES
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.compress.layer_work import restored, rewrite
from octavo.compress.modifiers.base import LayerResult
from octavo.compress.stored_layer import layer_parameters, read_layer
from octavo.errors import UserError

FOLDER = ".octavo-partial"
STATE = "state.json"  # below it: the fingerprint
CHECKPOINT = "checkpoint"  # below it: the files of the checkpoint while they are written


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
    of another fingerprint is refused with the differences; without, whatever is there is removed. Every file is on the
    disk before it has its name, so neither a killed process nor a power cut leaves half of one.
    """

    def __init__(self, output_dir: Path, fingerprint: dict[str, str], resume: bool) -> None:
        self.path = output_dir / FOLDER
        state = self.path / STATE
        if state.is_file() and resume:
            _check_same(json.loads(state.read_text(encoding="utf-8")), fingerprint, output_dir)
        else:
            remove_work(output_dir)
            with _written(state):
                self.path.mkdir(parents=True)
                write_text(state, json.dumps(fingerprint, indent=2))

    def _file(self, index: int) -> Path:
        return self.path / f"block-{index:05d}.safetensors"

    @property
    def _outside(self) -> Path:
        return self.path / "outside.safetensors"

    def save(
        self, index: int, results: list[LayerResult], tensors: Iterable[tuple[str, Tensor]], notes: list[str]
    ) -> None:
        """Write a block: the layers that were quantized as such, its other `tensors` as they are.

        It is there as a whole or not at all.
        """
        quantized = {f"{result.name}.weight": result for result in results if result.codes is not None}
        stored: dict[str, Tensor] = {}
        for name, tensor in tensors:
            stored |= layer_parameters(quantized[name]) if name in quantized else {name: tensor}
        about = {"layers": json.dumps([_entry(result) for result in results]), "notes": json.dumps(notes)}
        _save(self._file(index), stored, about)

    def save_outside(self, tensors: dict[str, Tensor]) -> None:
        """Write what a transform made of the tensors outside the blocks."""
        _save(self._outside, tensors, {})

    def outside(self) -> Iterator[tuple[str, Tensor]] | None:
        """What `save_outside` wrote, or None."""
        return _tensors(self._outside) if self._outside.is_file() else None

    def has(self, index: int) -> bool:
        """Whether a block is done."""
        return self._file(index).is_file()

    def count(self) -> int:
        """How many blocks are done."""
        return len(list(self.path.glob("block-*.safetensors")))

    def load(self, index: int) -> StoredBlock | None:
        """A block that is done, else None."""
        if not self.has(index):
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
        return _tensors(self._file(index))

    @contextmanager
    def checkpoint(self) -> Iterator[Path]:
        """An empty folder for the files of the checkpoint, until all of them are there."""
        path = self.path / CHECKPOINT
        with _written(path):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            yield path

    def publish(self, last: str) -> None:
        """Move the files of the checkpoint to the output directory, as `publish` does, and remove this folder."""
        publish(self.path / CHECKPOINT, self.path.parent, last)
        shutil.rmtree(self.path)


def publish(source: Path, target: Path, last: str) -> None:
    """Move the files of a checkpoint from one folder to another, `last` at the end.

    Without that file nothing takes `target` for a checkpoint: one that was there before goes first, and a process that
    is killed in between leaves none. Weights of an earlier checkpoint are removed.
    """
    names = sorted(path.name for path in source.iterdir())
    with _written(target):
        for path in source.rglob("*"):
            sync(path)
        (target / last).unlink(missing_ok=True)
        sync(target)
        for leftover in target.glob("model*.safetensors*"):
            leftover.unlink()
        for name in sorted(names, key=lambda name: name == last):
            if name == last:
                sync(target)
            if (target / name).is_dir():
                shutil.rmtree(target / name)
            os.replace(source / name, target / name)
        sync(target)


def begun_with(output_dir: Path, setting: str) -> str | None:
    """What the fingerprint of an interrupted run in `output_dir` has for `setting`, if there is one."""
    state = output_dir / FOLDER / STATE
    return json.loads(state.read_text(encoding="utf-8")).get(setting) if state.is_file() else None


def remove_work(output_dir: Path) -> None:
    """Remove what an earlier run left beside its checkpoint, if anything."""
    shutil.rmtree(output_dir / FOLDER, ignore_errors=True)


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a file. What is mapped of it counts as this process's memory, so it is let go on the way."""
    file, mapped = safe_open(path, framework="pt"), 0
    for name in file.keys():  # noqa: SIM118 - not a dict
        if mapped > MAPPED_BYTES:
            file, mapped = safe_open(path, framework="pt"), 0
        tensor = file.get_tensor(name)
        mapped += tensor.nbytes
        yield name, tensor


def _save(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    part = path.with_suffix(".part")
    with _written(path):
        save_file({name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}, part, metadata=about)
        put(part, path)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """A full disk ends the run with the way to go on."""
    try:
        yield
    except PermissionError as error:
        raise UserError(f"{path} may not be written ({error.strerror}); name another --output-dir") from error
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be written ({error}); free some space and go on with --resume, nothing else is lost"
        ) from error


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put(part: Path, path: Path) -> None:
    """Give a file its name when its content is on the disk."""
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """A text file, there as a whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    put(part, path)


def _is_dense(name: str, layers: set[str]) -> bool:
    module, _, leaf = name.rpartition(".")
    return leaf not in ("k_scale", "v_scale") and (module not in layers or leaf == "bias")


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
