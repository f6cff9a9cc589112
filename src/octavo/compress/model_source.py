"""The model that is compressed: a checkpoint that is read block by block, or one that is loaded already."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.base import save_tokenizer
from octavo.checkpoint.reader import Checkpoint, load_tokenizer, open_checkpoint
from octavo.checkpoint.transforms import refuse_online_transforms
from octavo.compress.blocks import refuse_unless_chain
from octavo.compress.empty_model import assign, compute_dtype, empty_model
from octavo.compress.experts import separate_experts
from octavo.compress.origin import origin_note, refuse_quantized
from octavo.engine.loading import pick_device
from octavo.errors import CheckpointError, UnsupportedModelError, UserError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

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
            raise _OtherNamesError(
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
                tensor = held[name] if not held[name].is_meta else self._tensor(name, held[name].shape)
                yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def save_files(self, directory: Path) -> None:
        if self._given is not None:
            save_tokenizer(self._given, directory)
        elif self.lacks_tokenizer() is None:
            self.checkpoint.save_tokenizer(directory)
        if self.checkpoint.generation_config:
            text = json.dumps(self.checkpoint.generation_config, indent=2, sort_keys=True)
            (directory / "generation_config.json").write_text(text + "\n", encoding="utf-8")


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
    except _OtherNamesError as error:
        check(error.model)
        loaded = _load_whole(checkpoint, error)
        return LoadedSource(loaded, checkpoint.load_tokenizer() if tokenizer is None else tokenizer, place)
    source.note_origin()
    return source


class _OtherNamesError(CheckpointError):
    """The checkpoint lacks tensors of the (empty) `model`, at least under its names."""

    def __init__(self, message: str, model: Any) -> None:
        super().__init__(message)
        self.model = model


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
