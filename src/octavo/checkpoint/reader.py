"""The way into a checkpoint: `open_checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from octavo.checkpoint.base import Checkpoint, dense
from octavo.checkpoint.dummy import DummyCheckpoint
from octavo.checkpoint.source import resolve_model
from octavo.errors import UserError

__all__ = ["Checkpoint", "DummyCheckpoint", "dense", "load_tokenizer", "open_checkpoint"]


def open_checkpoint(
    model: str | Path, load_format: str = "auto", seed: int = 0, device: torch.device | str = "cpu"
) -> Checkpoint:
    """Open what `resolve_model` finds: a directory of safetensors or a .gguf file.

    `load_format` "dummy" needs config.json alone and gives random weights made from `seed` on `device`. Raises
    ModelNotFoundError, CheckpointError or UnsupportedModelError, each with the file and the way out.
    """
    if load_format not in ("auto", "dummy"):
        raise UserError(f"load_format is {load_format!r}; it must be 'auto' or 'dummy'", param="load_format")
    if load_format == "dummy":
        return DummyCheckpoint(resolve_model(str(model), need="config"), seed, device)
    path = resolve_model(str(model))
    if path.is_file():
        from octavo.checkpoint.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(path)
    from octavo.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer of a model, or of a directory or Hub repository that holds no more than one."""
    path = resolve_model(str(model), need="tokenizer")
    if path.is_file():
        from octavo.checkpoint.gguf_file import GGUFFile
        from octavo.checkpoint.gguf_tokenizer import build_tokenizer

        return build_tokenizer(path, GGUFFile(path).metadata)
    from octavo.checkpoint.safetensors_checkpoint import load_directory_tokenizer

    return load_directory_tokenizer(path)
