"""What a compression asks of its model, wherever its tensors come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.base import save_tokenizer
from octavo.errors import UserError

Skip = tuple[str, ...]  # beginnings of full names


class ModelSource(ABC):
    """A transformers model whose tensors come and go by module.

    `model` is the PreTrainedModel, `name` what the user called it, `path` where it was read from if known, `device`
    where its modules run, `compute_dtype` the dtype they run in, `dtype` the one that unquantized tensors and scales
    are stored in, `keep` whether tensors stay in the model after use, `tokenizer` None when there is none.
    """

    model: Any
    name: str
    path: Path | None
    device: torch.device
    compute_dtype: torch.dtype
    dtype: torch.dtype
    keep: bool
    tokenizer: Any
    notes: list[str]  # for the report

    @abstractmethod
    def config_dict(self) -> dict[str, Any]:
        """config.json's content, without a quantization_config."""

    @abstractmethod
    def fill(self, module: nn.Module, prefix: str, skip: Skip = ()) -> None:
        """Give the tensors of `module` (full name `prefix`, "" for the model) their values, but those below `skip`."""

    def fetch(self, module: nn.Module, prefix: str) -> None:  # noqa: B027 - there may be nothing to read
        """`fill` will be called with these next: begin to read."""

    @abstractmethod
    def release(self, module: nn.Module, prefix: str, skip: Skip = ()) -> None:
        """The tensors of `module`, but those below `skip`, are not needed any more."""

    @abstractmethod
    def untie(self) -> None:
        """Give the output layer a weight of its own, if it shares that of the input embeddings; before `fill`."""

    @abstractmethod
    def stored(self, prefix: str, skip: Skip = ()) -> Iterator[tuple[str, Tensor]]:
        """Name and value, as they are to be stored, of the tensors below `prefix` but not below `skip`.

        The value is what the model holds now, or the checkpoint's where the model holds none.
        """

    def lacks_tokenizer(self) -> str | None:
        """Why there is no tokenizer to write, or None."""
        try:
            return "the model has none" if self.tokenizer is None else None
        except UserError as error:
            return str(error)

    def save_files(self, directory: Path) -> None:
        """Write tokenizer, with its chat template, and generation config."""
        if self.lacks_tokenizer() is None:
            save_tokenizer(self.tokenizer, directory)
        generation = getattr(self.model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(directory)
