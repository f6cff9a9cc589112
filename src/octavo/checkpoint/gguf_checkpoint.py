"""A GGUF file as a checkpoint with Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.gguf_blocks import PLAIN_TYPES, QUANTIZED_TYPES, code_bits, dequantize_any, repack
from octavo.checkpoint.gguf_config import architecture_of, huggingface_config, token_ids
from octavo.checkpoint.gguf_file import GGUFFile, GGUFTensor
from octavo.checkpoint.gguf_tokenizer import build_tokenizer
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.errors import UnsupportedModelError


class GGUFCheckpoint(Checkpoint):
    """Matrices in blocks of 32 (gguf_blocks) stay quantized; F32, F16 and BF16 are views of the mapped file."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        config = huggingface_config(self._file)
        super().__init__(path, config, token_ids(self._file.metadata))
        self._architecture = architecture_of(self._file)
        self._tensors = dict(self._named_tensors())

    def _named_tensors(self) -> Iterator[tuple[str, GGUFTensor]]:
        """Hugging Face's names; each expert of a tensor that holds all of them has its own."""
        for stored, tensor in self._file.tensors.items():
            name = self._architecture.name(stored)
            if name is not None and "{}" in name:
                yield from ((name.format(number), part) for number, part in enumerate(tensor.split()))
            elif name is not None:
                yield name, tensor

    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        found = self._read(name, shape)
        return found.dequantize() if isinstance(found, QuantizedWeight) else found

    def weight(self, module: str, shape: tuple[int, ...] | None = None) -> Tensor | QuantizedWeight:
        return self._read(f"{module}.weight", shape)

    def stored_bits(self, module: str) -> int | None:
        entry = self._tensors.get(f"{module}.weight")
        return None if entry is None else code_bits(entry.type_name)

    def load_tokenizer(self) -> Any:
        return build_tokenizer(self.path, self._file.metadata)

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's own keys and values."""
        return self._file.metadata

    def _read(self, name: str, shape: tuple[int, ...] | None) -> Tensor | QuantizedWeight:
        entry = self._tensors.get(name)
        if entry is None:
            raise self._missing(name)
        self._check_shape(name, entry.shape, shape)
        found = self._decode(entry)
        if self._architecture.one_added and name.endswith("norm.weight") and isinstance(found, Tensor):
            return found - 1
        order = self._row_order(name, entry)
        if order is None:
            return found
        return found.select_rows(order) if isinstance(found, QuantizedWeight) else found[order]

    def _decode(self, entry: GGUFTensor) -> Tensor | QuantizedWeight:
        raw, kind = self._file.raw(entry), entry.type_name
        if kind in PLAIN_TYPES:
            return torch.from_numpy(raw).view(PLAIN_TYPES[kind]).view(entry.shape)
        if kind in QUANTIZED_TYPES and len(entry.shape) == 2:
            return repack(raw, kind, (entry.shape[0], entry.shape[1]))
        try:
            return dequantize_any(raw, entry.type_number, entry.shape)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: tensor {entry.name!r} has the type {kind}, which cannot be dequantized; "
                "use another quantization of the model, such as Q4_1 or Q8_0"
            ) from error

    def _row_order(self, name: str, entry: GGUFTensor) -> Tensor | None:
        """llama.cpp stores q and k of Llama with the two halves of each head interleaved; this undoes it."""
        heads_of = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        projection = name.split(".")[-2]
        if not self._architecture.permuted or projection not in heads_of:
            return None
        heads = self.config[heads_of[projection]]
        rows = entry.shape[0]
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
