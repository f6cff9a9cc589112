"""Weights of the generic route: which tensors of a checkpoint make which parameter of a transformers model."""

from __future__ import annotations

import re
from collections import defaultdict
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor, nn

from octavo import ops
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.errors import CheckpointError
from octavo.layers.embedding import Embedding, OutputLayer
from octavo.layers.linear import Linear, LinearRotations
from octavo.layers.weights import WeightSource
from octavo.models.transformers_experts import load_experts

LINEAR_CLASSES = ("Linear", "FalconLinear")  # Falcon's adds its bias to the rounded product; here it is rounded once


class WeightPlan:
    """For each parameter of `model`, the checkpoint tensor or the conversion of several (fused experts) that gives it.

    Old names, base-model prefixes and fused layouts are resolved by transformers' own conversion tables, so that a
    checkpoint loads here as it does there.
    """

    def __init__(self, model: Any, source: WeightSource) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self.model, self.source = model, source
        self.direct: dict[str, str] = {}
        self.converted: dict[str, Tensor] = {}
        transforms = get_model_conversion_mapping(model)
        renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        wanted, prefix = model.state_dict(), model.base_model_prefix
        self._pending: dict[str, Any] = {}
        for name in sorted(source.checkpoint.names(), key=_natural):
            target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
            if target not in wanted and name in wanted:
                target, pattern = name, None
            if pattern is None:
                self.direct[target] = name
            else:
                converter = self._pending.setdefault(target, deepcopy(by_pattern[pattern]))
                converter.add_tensor(target, name, pattern, partial(source.checkpoint.tensor, name))
        self._targets = self._pending_targets(wanted)
        self._aliases = _shared_names(model)

    def _pending_targets(self, wanted: dict[str, Tensor]) -> dict[str, str]:
        """Parameter -> the pending conversion that makes it; one conversion may make several parameters."""
        targets = {}
        for first, converter in self._pending.items():
            base = converter.target_patterns[0]
            for pattern in converter.target_patterns:
                targets[first.replace(base, pattern) if base in first else first] = first
        return {name: first for name, first in targets.items() if name in wanted}

    def __contains__(self, name: str) -> bool:
        return name in self.direct or name in self._targets or name in self.converted

    def _known_name(self, name: str) -> str:
        """`name`, or the name of the parameter that is tied to it and that the checkpoint has."""
        return next((other for other in (name, *self._aliases.get(name, ())) if other in self), name)

    def module_key(self, name: str) -> str | None:
        """The checkpoint's module whose unconverted `.weight` is the parameter `name`, if there is one."""
        key = self.direct.get(self._known_name(name))
        return key.removesuffix(".weight") if key is not None and key.endswith(".weight") else None

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The parameter `name`, dense, of the wanted shape."""
        name = self._known_name(name)
        if name in self._targets and name not in self.converted:
            self._convert(self._targets[name])
        if name in self.converted:
            value = self.converted.pop(name)
            if tuple(value.shape) != shape:
                raise CheckpointError(
                    f"{self.source.checkpoint.path}: tensor {name} has shape {list(value.shape)}, but its config.json "
                    f"asks for {list(shape)}; config and weights do not belong together."
                )
            return value.to(device=self.source.device, dtype=self.source.dtype)
        return self.source.tensor(self.direct.get(name, name), shape)

    def _convert(self, first: str) -> None:
        made = self._pending.pop(first).convert(first, model=self.model, config=self.model.config)
        self.converted |= {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        self._targets = {name: other for name, other in self._targets.items() if other != first}


def _shared_names(model: nn.Module) -> dict[str, list[str]]:
    """For a parameter that several modules share, its other names."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def load_weights(model: Any, plan: WeightPlan) -> None:
    """Fills `model` (parameters on the meta device) and puts this package's layers where they serve.

    Plain `nn.Linear` becomes `Linear`, which keeps quantized weights quantized; tied plain embeddings share the packed
    weight of the output layer; experts become `RoutedExperts`. Whatever else has parameters keeps its class and gets
    dense tensors.
    """
    tied = _tie_output(model, plan)
    config = model.config.get_text_config()
    for path, module in list(model.named_modules()):
        experts = load_experts(path, module, config, plan.source)
        if experts is not None:
            _replace(model, path, experts)
        elif isinstance(module, nn.Linear) and type(module).__name__ in LINEAR_CLASSES and module not in tied:
            _replace(model, path, _load_linear(path, module, plan, model.get_output_embeddings() is module))
    for path, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = plan.tensor(f"{path}.{name}".lstrip("."), tuple(parameter.shape))
            module.register_parameter(name, nn.Parameter(value, requires_grad=False))
        _load_buffers(path, module, plan)


def _tie_output(model: Any, plan: WeightPlan) -> tuple[nn.Module, ...]:
    """Gives a tied output layer and a plain embedding one packed weight; returns the modules that are done."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is None or embedding is None or output.weight is not embedding.weight:
        return ()
    paths = {id(module): path for path, module in model.named_modules()}
    source, path = plan.source, paths[id(embedding)]
    shape = tuple(embedding.weight.shape)
    key = plan.module_key(f"{path}.weight")
    weight = source.embedding(key, shape) if key is not None else plan.tensor(f"{path}.weight", shape)
    packed = ops.pack_weight(weight, source.dtype, source.device)
    bias = None if getattr(output, "bias", None) is None else plan.tensor(f"{paths[id(output)]}.bias", (shape[0],))
    _replace(model, paths[id(output)], OutputLayer(packed, bias))
    if type(embedding) is nn.Embedding:
        _replace(model, path, Embedding(packed, source.dtype, source.device))
    else:  # a subclass that scales, for one: it keeps its code and gets a dense table
        dense = weight.dequantize(source.dtype) if isinstance(weight, QuantizedWeight) else weight
        embedding.weight = nn.Parameter(dense.to(source.device), requires_grad=False)
        plan.converted[f"{path}.weight"] = embedding.weight.data
    return (output,)


def _load_linear(path: str, module: nn.Linear, plan: WeightPlan, is_output: bool) -> nn.Module:
    source, shape = plan.source, (module.out_features, module.in_features)
    key = plan.module_key(f"{path}.weight")
    rotations = None
    if key is None:
        weight: Tensor | QuantizedWeight = plan.tensor(f"{path}.weight", shape)
    elif is_output:
        weight = source.embedding(key, shape)
    else:
        weight = source.weight(key, shape, rotates=True)
        rotations = LinearRotations.load(source, [(key, module.out_features)], module.in_features)
    bias = None if module.bias is None else plan.tensor(f"{path}.bias", (module.out_features,))
    if is_output:
        return OutputLayer(ops.pack_weight(weight, source.dtype, source.device), bias)
    return Linear([weight], bias, source.dtype, source.device, rotations=rotations)


def _load_buffers(path: str, module: nn.Module, plan: WeightPlan) -> None:
    """Buffers that a checkpoint holds replace what the constructor computed; all go to the model's device."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        full = f"{path}.{name}".lstrip(".")
        if full in plan and name not in module._non_persistent_buffers_set:
            buffer = plan.tensor(full, tuple(buffer.shape)).to(buffer.dtype)
        module._buffers[name] = buffer.to(plan.source.device)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sorts `experts.10` after `experts.9`, as conversions that stack experts rely on."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
