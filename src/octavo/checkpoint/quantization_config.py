"""Our own, tolerant reader of config.json's quantization_config (compressed-tensors).

Unknown keys are left alone and missing ones take the format's defaults, since files of many versions must load.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoint.config_fields import Fields
from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.errors import UnsupportedModelError

METHODS = ("compressed-tensors", "sparseml")
_INT8_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_FP8_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}
_CHANNEL8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
# A group may be a preset's name with its targets: {"W4A16": ["Linear"]}.
PRESETS: dict[str, dict[str, Any]] = {
    "W4A16": {"weights": {"num_bits": 4, "group_size": 128}},
    "W4A16_ASYM": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": False}},
    "W8A16": {"weights": _CHANNEL8},
    "W8A8": {"weights": _CHANNEL8, "input_activations": _INT8_TOKEN},
    "INT8": {"weights": _CHANNEL8, "input_activations": _INT8_TOKEN},
    "FP8": {"weights": _FP8_TENSOR, "input_activations": _FP8_TENSOR},
    "FP8_DYNAMIC": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    },
}


@dataclass(frozen=True)
class QuantizationGroup:
    """Modules that `targets` match (class names, full names or "re:" patterns) and how they are quantized."""

    targets: tuple[str, ...]
    scheme: WeightScheme
    format: str
    block_structure: tuple[int, int] | None = None


@dataclass(frozen=True)
class QuantizationConfig:
    """What is quantized how. `sparsity` is the format in which the weights' zeros were left out, or "dense"."""

    groups: tuple[QuantizationGroup, ...]
    ignore: tuple[str, ...]
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity: str = "dense"

    @classmethod
    def of(cls, config: dict[str, Any], path: Path) -> QuantizationConfig | None:
        """From a config.json's content; None for a plain checkpoint, UnsupportedModelError for another method."""
        fields = quantization_fields(config, path)
        if fields is None:
            return None
        method = fields.text("quant_method", METHODS[0])
        if method not in METHODS:
            raise UnsupportedModelError(
                f"{path}: the quantization method {method!r} is not known here; {METHODS[0]} is. "
                "Use the unquantized model, and `octavo compress` to make it small"
            )
        return cls.parse(fields.content, path)

    @classmethod
    def parse(cls, content: dict[str, Any], path: Path) -> QuantizationConfig:
        """From a quantization_config of compressed-tensors."""
        fields = Fields(content, path, "quantization_config")
        named = fields.within("config_groups")
        overall = fields.text("format", "dense")
        groups = [] if named is None else [_group(name, named, overall) for name in named.content]
        sparsity = fields.within("sparsity_config")
        cache = fields.within("kv_cache_scheme")
        return cls(
            tuple(group for group in groups if group is not None),
            fields.patterns("ignore"),
            None if cache is None else cache.content,
            "dense" if sparsity is None else sparsity.text("format", "dense"),
        )

    def is_ignored(self, module: str, module_class: str | None = None) -> bool:
        """Whether `ignore` names the module, by full name, "re:" pattern or class."""
        return best_match(self.ignore, module, module_class or class_of(module)) is not None

    def group_of(self, module: str, module_class: str | None = None) -> QuantizationGroup | None:
        """The group that a module belongs to: a full name goes before a pattern, a pattern before a class.

        `ignore` is not consulted.
        """
        module_class = module_class or class_of(module)
        found = [(best_match(group.targets, module, module_class), group) for group in self.groups]
        ranked = sorted(((rank, place) for place, (rank, _) in enumerate(found) if rank is not None))
        return found[ranked[0][1]][1] if ranked else None


def class_of(module: str) -> str:
    """The class of a module that the names alone can tell; quantized modules are linear layers or embeddings."""
    last = module.rpartition(".")[2]
    return "Embedding" if "embed" in last or last == "wte" else "Linear"


def best_match(targets: tuple[str, ...], module: str, module_class: str) -> int | None:
    """How the best of some targets names a module: 0 by full name, 1 by pattern, 2 by class, None not at all."""
    if module in targets:
        return 0
    if any(t.startswith("re:") and re.match(t[3:], module) for t in targets):
        return 1
    classes = (module_class, f"VocabParallel{module_class}") if module_class == "Embedding" else (module_class,)
    return 2 if any(name in targets for name in classes) else None


def quantization_fields(config: dict[str, Any], path: Path) -> Fields | None:
    """The quantization_config of a config.json, under its present or its old name; None for a plain checkpoint."""
    content = config.get("quantization_config") or config.get("compression_config")
    return Fields(content, path, "quantization_config") if content else None


def _group(name: str, named: Fields, overall: str) -> QuantizationGroup | None:
    group = named.content[name]
    if isinstance(group, list):
        if name.upper() not in PRESETS:
            raise UnsupportedModelError(
                f"{named.path}: the quantization preset {name!r} is unknown; {list(PRESETS)} are known"
            )
        group = {"targets": group, **PRESETS[name.upper()]}
    fields = Fields(group, named.path, f"{named.where}.{name}")
    weights = fields.within("weights")
    if weights is None:
        return None  # activations or attention only: the weights are plain
    scheme = weight_scheme(weights, fields.within("input_activations"))
    targets = fields.patterns("targets")
    return QuantizationGroup(targets, scheme, fields.text("format", overall), weights.pair("block_structure"))


def weight_scheme(weights: Fields, activations: Fields | None) -> WeightScheme:
    """compressed-tensors' QuantizationArgs -> WeightScheme, with its rule for a missing strategy."""
    size = weights.integer("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.text("strategy", inferred)
    if strategy == "group" and size in (-1, None):
        strategy = "channel"
    return WeightScheme(
        num_bits=weights.integer("num_bits", 8) or 0,
        type=weights.text("type", "int"),
        symmetric=weights.flag("symmetric", True),
        strategy=strategy,
        group_size=size if strategy in ("group", "tensor_group") else None,
        activations=None if activations is None else _activation_scheme(activations),
    )


def _activation_scheme(given: Fields) -> ActivationScheme:
    return ActivationScheme(
        num_bits=given.integer("num_bits", 8) or 0,
        type=given.text("type", "int"),
        symmetric=given.flag("symmetric", True),
        strategy=given.text("strategy", "group" if given.integer("group_size") else "tensor"),
        dynamic=given.flag("dynamic", False),
    )
