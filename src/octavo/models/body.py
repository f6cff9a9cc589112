"""Causal models for embeddings that were saved without their output layer, as `Qwen3Model` say.

Their tensors lack the name of the body ("layers.0…" for "model.layers.0…"), and some say the whole model's class
nevertheless (Qwen3-Embedding does).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.dummy import DummyCheckpoint
from octavo.checkpoint.quantized import QuantizedWeight

_BODY = "model."
_PROBE = "embed_tokens.weight"


def is_body(config: dict[str, Any]) -> bool:
    """Whether a config.json names a causal model's body alone, which gives no next token."""
    architectures = config.get("architectures") or []
    return bool(architectures) and str(architectures[0]).endswith("Model") and _whole_class(config) is not None


def complete(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as that of a whole model: its class in the config, names as the whole has them.

    Where the output layer is missing the token embeddings stand for it; what it gives is not to be read. A checkpoint
    of a whole model comes back as it is.
    """
    config = checkpoint.config
    if is_body(config):
        config = config | {"architectures": [_whole_class(config)], "tie_word_embeddings": True}
    made_up = isinstance(checkpoint, DummyCheckpoint)  # its names are the whole model's, and take seconds to find
    lacks_prefix = not made_up and _PROBE in checkpoint and _BODY + _PROBE not in checkpoint
    if config is checkpoint.config and not lacks_prefix:
        return checkpoint
    return _BodyCheckpoint(checkpoint, config, _BODY if lacks_prefix else "")


def _whole_class(config: dict[str, Any]) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    return None if found is None else str(found)


class _BodyCheckpoint(Checkpoint):
    """Reads from `inner`, whose names lack `prefix`."""

    def __init__(self, inner: Checkpoint, config: dict[str, Any], prefix: str) -> None:
        super().__init__(inner.path, config, inner.generation_config)
        self._inner, self._prefix = inner, prefix

    def names(self) -> list[str]:
        return [self._prefix + name for name in self._inner.names()]

    def __contains__(self, name: object) -> bool:
        return str(name).startswith(self._prefix) and self._inner_name(str(name)) in self._inner

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        return self._inner.tensor(self._inner_name(name), shape)

    def weight(self, module: str, shape: tuple[int, ...] | None = None) -> Tensor | QuantizedWeight:
        return self._inner.weight(self._inner_name(module), shape)

    def stored_bits(self, module: str) -> int | None:
        return self._inner.stored_bits(self._inner_name(module))

    def load_tokenizer(self) -> Any:
        return self._inner.load_tokenizer()

    def save_tokenizer(self, directory: Path) -> None:
        self._inner.save_tokenizer(directory)

    def _inner_name(self, name: str) -> str:
        return name.removeprefix(self._prefix)
