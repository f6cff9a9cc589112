"""What is finished survives a crash: one file a block, until the checkpoint is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from octavo.checkpoint.packing import unpack_codes
from octavo.checkpoint.scheme import WeightScheme
from octavo.checkpoint.writer import compressed_parameters
from octavo.compress.modifiers.base import LayerResult
from octavo.errors import UserError

FOLDER = ".octavo-partial"


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

    def save(self, index: int, results: list[LayerResult], dense: dict[str, Tensor]) -> None:
        """Write a block: its quantized layers and its other tensors. It is there as a whole or not at all."""
        tensors = dict(dense)
        for result in results:
            tensors |= compressed_parameters(
                result.name, result.codes, result.scale, result.scheme, None, result.scale_dtype
            )
        entries = [
            {"name": r.name, "shape": list(r.codes.shape), "error": r.error, "details": r.details, "notes": r.notes}
            for r in results
        ]
        part = self._file(index).with_suffix(".part")
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            save_file(contiguous, part, metadata={"layers": json.dumps(entries)})
            os.replace(part, self._file(index))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{part} cannot be written ({error}); free some space and go on with --resume, nothing else is lost"
            ) from error

    def load(self, index: int, schemes: dict[str, WeightScheme]) -> list[LayerResult] | None:
        """The results of a block, with codes and scales; None when it is not done."""
        if not self._file(index).is_file():
            return None
        with safe_open(self._file(index), framework="pt") as file:
            return [_result(file, entry, schemes[entry["name"]]) for entry in json.loads(file.metadata()["layers"])]

    def tensors(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """All tensors of a block, as the checkpoint holds them."""
        with safe_open(self._file(index), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)

    def remove(self) -> None:
        """The checkpoint is whole."""
        shutil.rmtree(self.path)


def _result(file: Any, entry: dict[str, Any], scheme: WeightScheme) -> LayerResult:
    name, columns = entry["name"], entry["shape"][1]
    scale = file.get_tensor(f"{name}.weight_scale")
    if scheme.activations is not None:
        codes = file.get_tensor(f"{name}.weight")
    else:
        codes = unpack_codes(file.get_tensor(f"{name}.weight_packed"), scheme.num_bits, columns)
    return LayerResult(
        name, scheme, codes, scale.float(), scale.dtype, entry["error"], entry["details"], entry["notes"]
    )


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
