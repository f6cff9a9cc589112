"""What every checkpoint is, whatever its files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.quantized import QuantizedWeight
from octavo.errors import CheckpointError


class Checkpoint:
    """An opened checkpoint; tensors are read when they are asked for, under Hugging Face's names.

    `path` is its directory or file, `config` the content of config.json and `generation_config` that of
    generation_config.json ({} when there is none). Whatever is truncated, missing or of a wrong shape raises
    CheckpointError with the file, the tensor and the shapes.
    """

    def __init__(self, path: Path, config: dict[str, Any], generation_config: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config

    def names(self) -> list[str]:
        """Names of the dense tensors that `tensor` gives, "….weight" for a quantized weight too."""
        raise NotImplementedError

    def __contains__(self, name: object) -> bool:
        raise NotImplementedError

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The dense tensor `name`, dequantized when needed; the file's dtype for plain files.

        With `shape` given, anything else is an error that names both.
        """
        raise NotImplementedError

    def weight(self, module: str, shape: tuple[int, ...] | None = None) -> Tensor | QuantizedWeight:
        """The weight of a module such as "model.layers.0.self_attn.q_proj", kept quantized where its format is."""
        raise NotImplementedError

    def stored_bits(self, module: str) -> int | None:
        """Bits of a code of the weight of a module where it is stored quantized; None for a plain one."""
        raise NotImplementedError

    def load_tokenizer(self) -> Any:
        """A transformers fast tokenizer, with the chat template; CheckpointError when there is none."""
        raise NotImplementedError

    def save_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer's files into `directory`, as transformers of any version and vLLM read them."""
        save_tokenizer(self.load_tokenizer(), directory)

    def _missing(self, name: str) -> CheckpointError:
        close = [other for other in self.names() if other.split(".")[-2:] == name.split(".")[-2:]][:3]
        hint = f"; it has {', '.join(close)}, for instance" if close else ""
        return CheckpointError(
            f"{self.path}: tensor {name!r} is missing{hint}. The checkpoint is incomplete or of another architecture; "
            "download it again"
        )

    def _check_shape(self, name: str, found: tuple[int, ...], shape: tuple[int, ...] | None) -> None:
        if shape is not None and tuple(found) != tuple(shape):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has shape {list(found)}, but its config.json asks for {list(shape)}. "
                "Config and weights do not belong together; download the checkpoint again"
            )


def dense(weight: Tensor | QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight as one dense tensor: unchanged when it is one, dequantized to `dtype` when it is quantized."""
    return weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """`save_pretrained`, with the class name and the template's place that older readers know as well."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if tokenizer.chat_template:
        config["chat_template"] = tokenizer.chat_template
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
