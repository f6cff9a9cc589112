"""Writing safetensors one shard at a time."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from octavo.errors import CheckpointError

SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class ShardWriter:
    """Writes tensors to shards as they come, holding one shard in memory.

    A shard is complete when it is there under its name: it is written beside it and renamed. Shards are
    "model-00001.safetensors" and so on until `close` knows their number; then they become
    "model-00001-of-0000N.safetensors" with an index, or "model.safetensors" when there is one. With `resume`, it goes
    on after the complete shards of a writer that was not closed (`written` says which tensors they hold); without, it
    removes them.
    """

    def __init__(self, directory: str | Path, max_shard_bytes: int = SHARD_BYTES, *, resume: bool = False) -> None:
        if max_shard_bytes <= 0:
            raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; it must be positive")
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._max_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[dict[str, int]] = []  # name -> bytes, by shard
        if resume:
            self._find_complete_shards()
        else:
            for leftover in self.directory.glob("model-[0-9][0-9][0-9][0-9][0-9].safetensors"):
                leftover.unlink()

    @property
    def written(self) -> set[str]:
        """Names of the tensors in complete shards."""
        return {name for shard in self._shards for name in shard}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; a full shard is written. A name given twice is an error."""
        if name in self._pending or any(name in shard for shard in self._shards):
            raise CheckpointError(f"tensor {name!r} is written twice to {self.directory}")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_bytes:
            self.flush()
        # A view would be stored with all that it looks into, and a mapped one would change with its file.
        self._pending[name] = tensor.detach().to("cpu").contiguous().clone()
        self._pending_bytes += size

    def flush(self) -> None:
        """Write what is pending as a shard of its own (the block pipeline does so after each block)."""
        if not self._pending:
            return
        number = len(self._shards) + 1
        _save(self._pending, self.directory / f"model-{number:05d}.safetensors")
        self._shards.append({name: t.numel() * t.element_size() for name, t in self._pending.items()})
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> list[Path]:
        """Write the rest, give the shards their final names and write the index; returns the weight files."""
        self.flush()
        count = len(self._shards)
        if count == 0:
            raise CheckpointError(f"no tensor was written to {self.directory}")
        names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count > 1:
            write_json(self.directory / INDEX, self._index(names))
        for number, name in enumerate(names):
            os.replace(self.directory / f"model-{number + 1:05d}.safetensors", self.directory / name)
        if count == 1:
            (self.directory / INDEX).unlink(missing_ok=True)
        self._remove_leftovers(set(names))
        return [self.directory / name for name in names]

    def _index(self, names: list[str]) -> dict[str, Any]:
        total = sum(size for shard in self._shards for size in shard.values())
        weight_map = {name: file for file, shard in zip(names, self._shards, strict=True) for name in shard}
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    def _remove_leftovers(self, names: set[str]) -> None:
        """Weights of an earlier checkpoint in the same directory would be read together with these."""
        for path in self.directory.glob("model*.safetensors"):
            if path.name not in names:
                path.unlink()

    def _find_complete_shards(self) -> None:
        while (path := self.directory / f"model-{len(self._shards) + 1:05d}.safetensors").is_file():
            try:
                self._shards.append(_tensor_sizes(path))
            except (SafetensorError, OSError):
                path.unlink()  # the machine went down before the file was on the disk: it is made again
                return


def _tensor_sizes(path: Path) -> dict[str, int]:
    """Name -> bytes of a safetensors file's tensors; SafetensorError for a broken one."""
    with safe_open(path, framework="pt"):  # checks the whole header against the file's size
        pass
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: end - start for name, (start, end) in spans.items()}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """One safetensors file, there as a whole or not at all. The metadata is what transformers asks for."""
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(tensors, part, metadata={"format": "pt"})
        part.chmod(0o666 & ~_umask())  # the library writes for the owner alone
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written ({error}); free some space or name another folder") from error


def _umask() -> int:
    """The process's mask; there is no way to read it but to set it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As Hugging Face writes it: two spaces, sorted keys, a newline at the end; whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)
