"""The way into a checkpoint: `open_checkpoint`."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoint.base import Checkpoint, dense
from octavo.checkpoint.dummy import DummyCheckpoint
from octavo.checkpoint.source import resolve_model

__all__ = ["Checkpoint", "DummyCheckpoint", "dense", "open_checkpoint"]


def open_checkpoint(model: str | Path, load_format: str = "auto") -> Checkpoint:
    """Open what `resolve_model` finds: a directory of safetensors or a .gguf file.

    `load_format` "dummy" needs config.json alone and gives random weights. Raises ModelNotFoundError, CheckpointError
    or UnsupportedModelError, each with the file and the way out.
    """
    path = resolve_model(str(model))
    if load_format == "dummy":
        return DummyCheckpoint(path)
    if path.is_file():
        from octavo.checkpoint.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(path)
    from octavo.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)
