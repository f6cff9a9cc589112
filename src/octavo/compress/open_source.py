"""From what the user names to a model that can be compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from octavo.checkpoint.reader import Checkpoint, open_checkpoint
from octavo.checkpoint.transforms import refuse_online_transforms
from octavo.compress.checkpoint_source import CheckpointSource, OtherNamesError
from octavo.compress.loaded_source import LoadedSource
from octavo.compress.model_source import ModelSource
from octavo.engine.loading import pick_device
from octavo.errors import CheckpointError


def open_source(
    model: Any,
    tokenizer: Any = None,
    keep: bool = False,
    check: Callable[[Any], object] = lambda model: None,
    device: str = "cpu",
) -> ModelSource:
    """A source for a model's name or path, or for a loaded model. UserError's kinds say why one cannot be had.

    `device` is where its blocks will run: "cpu", "cuda", or "auto", the GPU where there is one.

    A checkpoint whose tensors do not have the names of the model's modules (GPT-NeoX) is loaded whole by transformers.
    That takes long, so `check` is called with the empty model before; what it raises ends it.
    """
    place = pick_device(device)
    if isinstance(model, nn.Module):
        return LoadedSource(model, tokenizer, place)
    checkpoint = open_checkpoint(model)
    refuse_online_transforms(checkpoint.config, checkpoint.path, "compressing its weights again")
    try:
        source = CheckpointSource(checkpoint, str(model), tokenizer, keep, place)
    except OtherNamesError as error:
        check(error.model)
        loaded = _load_whole(checkpoint, error)
        return LoadedSource(loaded, checkpoint.load_tokenizer() if tokenizer is None else tokenizer, place)
    source.note_origin()
    return source


def _load_whole(checkpoint: Checkpoint, error: CheckpointError) -> Any:
    """Loaded by transformers, which knows of renamed tensors; `error` if that finds tensors missing too."""
    from transformers import AutoModelForCausalLM

    if not checkpoint.path.is_dir():
        raise error
    loader: Any = AutoModelForCausalLM
    with _quiet_transformers():  # its report of what is missing would come before the error, which says it
        model, info = loader.from_pretrained(checkpoint.path, output_loading_info=True)
    if info["missing_keys"] or info.get("mismatched_keys"):
        raise CheckpointError(str(error)) from None
    return model.requires_grad_(False)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
