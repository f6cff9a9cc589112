"""A model that the caller has loaded, to be compressed in place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.reader import load_tokenizer
from octavo.compress.blocks import refuse_unless_chain
from octavo.compress.experts import separate_experts
from octavo.compress.model_source import ModelSource, Skip
from octavo.compress.origin import refuse_quantized
from octavo.errors import UnsupportedModelError, UserError


class LoadedSource(ModelSource):
    """A PreTrainedModel in memory; it is changed in place."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device | None = None) -> None:
        refuse_unless_chain(model.config, type(model).__name__)
        refuse_quantized(model)
        self.notes = []
        self.model = model.eval()
        separate_experts(model)
        self.name = model.config._name_or_path or type(model).__name__
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.compute_dtype = self.dtype
        self.device, self._home = device or model.device, model.device
        self._tokenizer = tokenizer
        self.keep = True
        self.path = Path(model.config._name_or_path) if model.config._name_or_path else None
        if model.device.type == "meta":
            raise UnsupportedModelError(f"{self.name} has no weights (it is on the meta device); load it first")

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]
        """The one that was given, else the one of the directory or repository that the model was loaded from."""
        if self._tokenizer is None and self.model.config._name_or_path:
            try:
                self._tokenizer = load_tokenizer(self.model.config._name_or_path)
            except UserError:
                return None  # calibration says so when it meets text
        return self._tokenizer

    def config_dict(self) -> dict[str, Any]:
        config = self.model.config.to_dict()
        config.pop("quantization_config", None)
        config["architectures"] = [type(self.model).__name__]
        return json.loads(json.dumps(config, default=lambda value: str(value).removeprefix("torch.")))

    def fill(self, module: nn.Module, prefix: str, skip: Skip = ()) -> None:
        """Everything is there, at most on another device."""
        _move(module, prefix, skip, self.device)

    def release(self, module: nn.Module, prefix: str, skip: Skip = ()) -> None:
        """Everything stays, it is the caller's model."""
        _move(module, prefix, skip, self._home)

    def untie(self) -> None:
        output = self.model.get_output_embeddings()
        if output is not None and output.weight is self.model.get_input_embeddings().weight:
            output.weight = nn.Parameter(output.weight.detach().clone(), requires_grad=False)
        self.model.config.get_text_config().tie_word_embeddings = False
        self.model.config.tie_word_embeddings = False

    def stored(self, prefix: str, skip: Skip = ()) -> Iterator[tuple[str, Tensor]]:
        tied = getattr(self.model.config, "tie_word_embeddings", False)
        output = self.model.get_output_embeddings() if tied else None
        for name, tensor in self.model.state_dict().items():
            is_tied = (
                output is not None and name.endswith("lm_head.weight") and tensor.data_ptr() == _input_ptr(self.model)
            )
            if name.startswith(prefix) and not name.startswith(skip) and not is_tied:
                yield name, tensor


def _move(module: nn.Module, prefix: str, skip: Skip, device: torch.device) -> None:
    for name, tensor in module.state_dict(prefix=f"{prefix}." if prefix else "", keep_vars=True).items():
        if tensor.device != device and not name.startswith(skip):
            tensor.data = tensor.data.to(device)
    for name, owner in module.named_modules():
        for leaf in owner._non_persistent_buffers_set:
            buffer = owner._buffers[leaf]
            if buffer is not None and not f"{prefix}.{name}.".lstrip(".").startswith(skip):
                owner._buffers[leaf] = buffer.to(device)


def _input_ptr(model: Any) -> int:
    return model.get_input_embeddings().weight.data_ptr()
