"""GGUF files: metadata, and tensors as views of the mapped file.

The header is parsed here rather than by the `gguf` package because that makes four numpy arrays a vocabulary entry,
which takes seconds. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# ggml's type numbers -> (name, elements a block, bytes a block) of the types that are read without the gguf package.
BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
KNOWN_TYPES = {number: name for number, (name, _, _) in BLOCKS.items()}


def block_layout(number: int) -> tuple[str, int, int]:
    """(name, elements a block, bytes a block) of a ggml type; KeyError for one that nobody knows."""
    if number not in BLOCKS:
        import gguf

        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise KeyError(number) from error
        BLOCKS[number] = (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    return BLOCKS[number]


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: `shape` in torch's order (outermost first), `offset` in bytes from the file's start."""

    name: str
    type_number: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def split(self) -> list[GGUFTensor]:
        """The slices along the first dimension."""
        size = self.num_bytes // self.shape[0]
        return [
            GGUFTensor(f"{self.name}[{index}]", self.type_number, self.shape[1:], self.offset + index * size, size)
            for index in range(self.shape[0])
        ]

    @property
    def type_name(self) -> str:
        return block_layout(self.type_number)[0]


class GGUFFile:
    """A GGUF file, mapped: `metadata` by key and `tensors` by ggml's names. CheckpointError for a broken file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Copy on write: torch wants writable memory, and the file must not change.
            self._data = np.memmap(path, dtype=np.uint8, mode="c")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); download it again") from error
        self._bytes = self._data.data
        self._position = 0
        try:
            num_tensors, num_keys = self._header()
            self.metadata = self._read_metadata(num_keys)
            self.tensors = self._read_tensor_table(num_tensors)
        except (struct.error, UnicodeDecodeError, IndexError, OverflowError, MemoryError) as error:
            raise self._broken(f"its header ends or breaks at byte {self._position}") from error

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is not a whole GGUF file of {len(self._data)} bytes: {what}. Download it again"
        )

    def _header(self) -> tuple[int, int]:
        if bytes(self._bytes[:4]) != MAGIC:
            raise self._broken(f"it begins with {bytes(self._bytes[:4])!r}, not {MAGIC!r}")
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", self._bytes, 4)
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} is GGUF version {version}; 2 and 3, little-endian, are read")
        self._position = 24
        return num_tensors, num_keys

    def _read_metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        return metadata

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._bytes, self._position)
        self._position += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # Local names: a vocabulary and its merges make a hundred thousand rounds of this loop.
        data, position, end, unpack = self._bytes, self._position, len(self._bytes), struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > end:
                raise self._broken(f"the string at byte {start - 8} reaches past the end")
            strings.append(str(data[start:position], "utf-8"))
        self._position = position
        return strings

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise self._broken(f"metadata type {kind} at byte {self._position} is unknown")
        item, count = self._scalar("I"), self._scalar("Q")
        if item == STRING:
            return self._strings(count)
        if item not in SCALARS:
            return [self._value(item) for _ in range(count)]
        dtype = np.dtype(SCALARS[item]).newbyteorder("<")
        end = self._position + count * dtype.itemsize
        if end > len(self._bytes):
            raise self._broken(f"the array at byte {self._position} reaches past the end")
        values = np.frombuffer(self._bytes[self._position : end], dtype=dtype)
        self._position = end
        return values.tolist()

    def _read_tensor_table(self, num_tensors: int) -> dict[str, GGUFTensor]:
        entries = []
        for _ in range(num_tensors):
            name = self._string()
            num_dims = self._scalar("I")
            if num_dims > 8:
                raise self._broken(f"tensor {name!r} has {num_dims} dimensions")
            dims = [self._scalar("Q") for _ in range(num_dims)]
            entries.append((name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        start = math.ceil(self._position / max(alignment, 1)) * alignment
        return {name: self._placed(name, shape, kind, start + offset) for name, shape, kind, offset in entries}

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            type_name, elements, block_bytes = block_layout(kind)
        except KeyError as error:
            raise CheckpointError(f"{self.path}: tensor {name!r} has the unknown type {kind}; update gguf") from error
        if not shape or shape[-1] % elements:
            raise self._broken(f"tensor {name!r} {list(shape)} cannot be {type_name}, whose blocks hold {elements}")
        num_bytes = math.prod(shape) // elements * block_bytes
        if offset + num_bytes > len(self._data):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name!r} {list(shape)} {type_name} needs bytes {offset} to "
                f"{offset + num_bytes}, the file ends at {len(self._data)}. Download it again"
            )
        return GGUFTensor(name, kind, shape, offset, num_bytes)

    def raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes: a view of the mapped file."""
        return self._data[tensor.offset : tensor.offset + tensor.num_bytes].view(np.ndarray)
