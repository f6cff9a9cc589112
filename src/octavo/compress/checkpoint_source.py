"""A checkpoint that is compressed block by block, each read when its turn comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.base import save_tokenizer
from octavo.checkpoint.reader import Checkpoint
from octavo.compress.empty_model import assign, compute_dtype, empty_model
from octavo.compress.experts import separate_experts
from octavo.compress.model_source import ModelSource, Skip
from octavo.compress.origin import origin_note
from octavo.errors import CheckpointError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class CheckpointSource(ModelSource):
    """A checkpoint on disk and an empty transformers model; `keep` leaves what was filled, in the host's memory."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        tokenizer: Any = None,
        keep: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.checkpoint, self.name, self.keep = checkpoint, name, keep
        self.path = checkpoint.path
        self.device = device or torch.device("cpu")
        self._given = self._tokenizer = tokenizer
        self._untied = False
        config = self.config_dict()
        self.dtype = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)
        self.compute_dtype = compute_dtype(self.dtype, self.device)
        self.model = empty_model(config, self.compute_dtype, self.device)
        separate_experts(self.model)
        self._tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        self._names = self._checkpoint_names()
        self.notes = []
        self._reader: ThreadPoolExecutor | None = None
        self._coming: dict[str, Future[dict[str, Tensor]]] = {}

    def note_origin(self) -> None:
        """Refuse what should not be compressed again; what is dequantized first is noted."""
        linears = [name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        stored = [
            self._names[f"{name}.weight"].removesuffix(".weight") for name in linears if f"{name}.weight" in self._names
        ]
        note = origin_note(self.checkpoint, stored)
        self.notes = [] if note is None else [note]

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]
        if self._tokenizer is None:
            self._tokenizer = self.checkpoint.load_tokenizer()
        return self._tokenizer

    def config_dict(self) -> dict[str, Any]:
        config = {key: value for key, value in self.checkpoint.config.items()
                  if key not in ("quantization_config", "compression_config")}  # fmt: skip
        return config | {"tie_word_embeddings": False} if self._untied else config

    def _checkpoint_names(self) -> dict[str, str]:
        """Name in the model -> name in the checkpoint, which may lack the base model's prefix."""
        prefix = f"{self.model.base_model_prefix}."
        names, missing = {}, []
        for name in self.model.state_dict():
            found = next((n for n in (name, name.removeprefix(prefix)) if n in self.checkpoint), None)
            if found is not None:
                names[name] = found
            elif name not in self._tied:
                missing.append(name)
        if missing:
            raise OtherNamesError(
                f"{self.checkpoint.path} lacks {len(missing)} tensors of {type(self.model).__name__}, the first is "
                f"{missing[0]!r}; the checkpoint is incomplete, or names its tensors in a way that is not read",
                self.model,
            )
        return names

    def _tensor(self, name: str, shape: torch.Size) -> Tensor:
        return self.checkpoint.tensor(self._names[name], tuple(shape))

    def fill(self, module: nn.Module, prefix: str, skip: Skip = ()) -> None:
        coming = self._coming.pop(prefix, None)
        fetched = {} if coming is None else coming.result()
        for full, old in self._wanted(module, prefix, skip):
            tensor = fetched.pop(full) if full in fetched else self._tensor(full, old.shape)
            dtype = self.compute_dtype if tensor.is_floating_point() else tensor.dtype
            assign(module, full.removeprefix(f"{prefix}."), tensor.to(self.device, dtype, non_blocking=True))
        if not prefix and not self._untied:
            self.model.tie_weights()

    def _wanted(self, module: nn.Module, prefix: str, skip: Skip) -> list[tuple[str, Tensor]]:
        """Full names of a module's tensors that the checkpoint has, and what stands in their place."""
        held = module.state_dict(prefix=f"{prefix}." if prefix else "", keep_vars=True)
        return [(name, old) for name, old in held.items() if name in self._names and not name.startswith(skip)]

    def fetch(self, module: nn.Module, prefix: str) -> None:
        """Reads in a thread, into memory that a GPU copies from. A CPU is busy, and its memory is spared."""
        if self.device.type != "cuda":
            return
        wanted = [(name, old.shape) for name, old in self._wanted(module, prefix, ())]
        self._reader = self._reader or ThreadPoolExecutor(1)
        self._coming[prefix] = self._reader.submit(
            lambda: {name: self._tensor(name, shape).pin_memory() for name, shape in wanted}
        )

    def untie(self) -> None:
        output = self.model.get_output_embeddings()
        names = {id(module): name for name, module in self.model.named_modules()}
        weight = f"{names[id(output)]}.weight"
        if weight not in self._tied:
            return
        source = f"{names[id(self.model.get_input_embeddings())]}.weight"
        assign(output, "weight", torch.empty_like(output.weight))
        self._names.setdefault(weight, self._names[source])
        self._tied, self._untied = self._tied - {weight}, True
        self.model.config.tie_word_embeddings = False

    def release(self, module: nn.Module, prefix: str, skip: Skip = ()) -> None:
        to = "cpu" if self.keep else "meta"
        moved: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one
        for name, value in list(module.named_parameters(prefix=prefix, remove_duplicate=False)):
            if not name.startswith(skip) and value.device.type not in (to, "meta"):
                path, _, leaf = name.removeprefix(f"{prefix}.").rpartition(".")
                if value not in moved:
                    moved[value] = nn.Parameter(value.to(to), requires_grad=False)
                module.get_submodule(path)._parameters[leaf] = moved[value]

    def stored(self, prefix: str, skip: Skip = ()) -> Iterator[tuple[str, Tensor]]:
        held = self.model.state_dict()
        for name in self._names:
            if name.startswith(prefix) and not name.startswith(skip) and name not in self._tied:
                yield name, self._as_stored(name, held[name])  # no variable keeps it while the next one is read

    def _as_stored(self, name: str, held: Tensor) -> Tensor:
        tensor = self._tensor(name, held.shape) if held.is_meta else held
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def save_files(self, directory: Path) -> None:
        if self._given is not None:
            save_tokenizer(self._given, directory)
        elif self.lacks_tokenizer() is None:
            self.checkpoint.save_tokenizer(directory)
        if self.checkpoint.generation_config:
            text = json.dumps(self.checkpoint.generation_config, indent=2, sort_keys=True)
            (directory / "generation_config.json").write_text(text + "\n", encoding="utf-8")


class OtherNamesError(CheckpointError):
    """The checkpoint lacks tensors of the (empty) `model`, at least under its names."""

    def __init__(self, message: str, model: Any) -> None:
        super().__init__(message)
        self.model = model
