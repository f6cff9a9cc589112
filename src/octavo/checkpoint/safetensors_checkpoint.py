"""A directory of config.json, safetensors and tokenizer files."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.checkpoint.base import Checkpoint, dense
from octavo.checkpoint.methods import OWN_FILES, module_reader
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAPPED_BYTES = 2**25
SMALL_BYTES = 2**16
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "spiece.model",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class SafetensorsCheckpoint(Checkpoint):
    """Plain tensors come as they are stored; what is quantized stays so where memory has a layout for it."""

    def __init__(self, path: Path) -> None:
        config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        super().__init__(path, config, read_json(generation) if generation.is_file() else {})
        self._shards: dict[str, Any] = {}
        self._mapped: dict[str, int] = {}
        self._files = self._locate()
        self._reader = module_reader(with_own_file(config, path), path, self)

    def names(self) -> list[str]:
        """Dense names: the parts of a quantized weight count as its one "….weight"."""
        if self._reader is None:
            return list(self._files)
        dense_names = (self._reader.dense_name(name) for name in self._files)
        return list(dict.fromkeys(name for name in dense_names if name))

    def __contains__(self, name: object) -> bool:
        return name in self._files or (self._reader is not None and self._reader.holds(str(name)))

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        return dense(self._read(name, shape))

    def weight(self, module: str, shape: tuple[int, ...] | None = None) -> Tensor | QuantizedWeight:
        return self._read(f"{module}.weight", shape)

    def stored_bits(self, module: str) -> int | None:
        name = f"{module}.weight"
        return self._reader.stored_bits(name) if self._reader is not None and self._reader.holds(name) else None

    def _read(self, name: str, shape: tuple[int, ...] | None) -> Tensor | QuantizedWeight:
        if self._reader is None or not self._reader.holds(name):
            return self.stored(name, shape)
        found = self._reader.read(name)
        self._check_shape(name, tuple(found.shape), shape)
        return found

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor just as the file has it."""
        file = self._files.get(name)
        if file is None:
            raise self._missing(name)
        try:
            found: Tensor = self._open(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path / file}: tensor {name!r} cannot be read ({error}); download the file again"
            ) from error
        self._check_shape(name, tuple(found.shape), shape)
        self._release(file, found.nbytes)
        # A norm's weight would keep the mapping of its whole file alive.
        return found.clone() if found.nbytes < SMALL_BYTES else found

    def _release(self, file: str, num_bytes: int) -> None:
        """Lets a shard's mapping go once MAPPED_BYTES of it were read; tensors that are still in use keep theirs.

        The pages of what was copied would otherwise count as this process's memory: two copies of the model.
        """
        self._mapped[file] = self._mapped.get(file, 0) + num_bytes
        if self._mapped[file] > MAPPED_BYTES:
            self._mapped[file] = 0
            self._shards.pop(file, None)

    def has_stored(self, name: str) -> bool:
        return name in self._files

    def load_tokenizer(self) -> Any:
        return load_directory_tokenizer(self.path)

    def save_tokenizer(self, directory: Path) -> None:
        """The files themselves: nothing is more faithful."""
        self.load_tokenizer()  # a broken one is told before it is copied
        for pattern in TOKENIZER_PATTERNS:
            for file in self.path.glob(pattern):
                shutil.copyfile(file, directory / file.name)

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name, from the index or, without one, from the files themselves."""
        index = self.path / INDEX
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index} has no weight_map; download the checkpoint again")
            self._check_shards(weight_map)
            return weight_map
        files = [SINGLE] if (self.path / SINGLE).is_file() else sorted(f.name for f in self.path.glob("*.safetensors"))
        if not files:
            raise self._no_weights()
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 - not a dict

    def _check_shards(self, weight_map: dict[str, str]) -> None:
        for file in sorted(set(weight_map.values())):
            if Path(file).name != file:
                raise CheckpointError(f"{self.path / INDEX} names the shard {file!r}, which is not a plain file name")
            if not (self.path / file).is_file():
                tensors = [name for name, where in weight_map.items() if where == file]
                raise CheckpointError(
                    f"{self.path}: shard {file} is missing; {INDEX} says that it holds {len(tensors)} tensors "
                    f"({tensors[0]!r} is the first). Download the checkpoint again"
                )
            held = set(self._open(file).keys())
            for name, where in weight_map.items():
                if where == file and name not in held:
                    raise CheckpointError(f"{self.path / file}: tensor {name!r} is missing, though {INDEX} names it")

    def _no_weights(self) -> CheckpointError:
        pickles = sorted(f.name for f in self.path.glob("*.bin")) + sorted(f.name for f in self.path.glob("*.pt"))
        if pickles:
            return CheckpointError(
                f"{self.path} holds pickled weights only ({pickles[0]}), which can run any code when they are read, so "
                "they are never opened; convert them to safetensors first (save_pretrained of transformers writes that)"
            )
        ggufs = sorted(f.name for f in self.path.glob("*.gguf"))
        way_out = f"for GGUF give the file itself: {self.path / ggufs[0]}" if ggufs else "download the checkpoint again"
        return CheckpointError(f"{self.path} holds no .safetensors file; {way_out}")

    def _open(self, file: str) -> Any:
        if file not in self._shards:
            path = self.path / file
            try:
                self._shards[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(f"{path} {_what_is_wrong(path, error)}. Download it again") from error
        return self._shards[file]


def with_own_file(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The configuration, with the quantization that an older tool kept in a file of its own."""
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    for name, method in OWN_FILES.items():
        if (path / name).is_file():
            return config | {"quantization_config": {"quant_method": method} | read_json(path / name)}
    return config


def _what_is_wrong(path: Path, error: Exception) -> str:
    """Why a safetensors file does not open: sizes for a truncated one, the library's words otherwise."""
    size = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= size else {}
        ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
    except (struct.error, ValueError, OSError, KeyError, TypeError, AttributeError):
        ends = {}
    lost = sorted((end, name) for name, end in ends.items() if end > size)
    if lost:
        name = lost[0][1]
        whole = max(ends.values())
        return (
            f"is truncated: it has {size} of {whole} bytes, and tensor {name!r} {header[name].get('shape')} "
            f"is the first of {len(lost)} cut off"
        )
    return f"is not a whole safetensors file ({error}; {size} bytes)"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError with the place when it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}; a checkpoint directory needs config.json and .safetensors files"
        ) from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not an object; download it again")
    return content


def load_directory_tokenizer(path: Path) -> Any:
    """transformers' tokenizer from the files of a directory, never from the network."""
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{path} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there. Copy the model's "
            "tokenizer files into it, or name another tokenizer with --tokenizer"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises nothing more precise
        raise CheckpointError(
            f"the tokenizer in {path} cannot be loaded ({error}); name another one with --tokenizer"
        ) from error
