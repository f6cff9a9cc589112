"""Our own, tolerant reader of config.json's quantization_config (compressed-tensors).

Unknown keys are left alone and missing ones take the format's defaults, since files of many versions must load.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.errors import CheckpointError, UnsupportedModelError

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
    """What is quantized how."""

    groups: tuple[QuantizationGroup, ...]
    ignore: tuple[str, ...]
    kv_cache_scheme: dict[str, Any] | None = None

    @classmethod
    def of(cls, config: dict[str, Any], path: Path) -> QuantizationConfig | None:
        """From a config.json's content; None for a plain checkpoint, UnsupportedModelError for another method."""
        content = config.get("quantization_config") or config.get("compression_config")
        if not content:
            return None
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: quantization_config is {type(content).__name__}, not an object")
        method = content.get("quant_method", "compressed-tensors")
        if method not in METHODS:
            raise UnsupportedModelError(
                f"{path}: the quantization method {method!r} is not read; {METHODS[0]} is. "
                "Use the unquantized model, and `octavo compress` to make it small"
            )
        sparsity = (content.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise UnsupportedModelError(
                f"{path}: the sparse format {sparsity!r} is not read; use the dense checkpoint of the model"
            )
        return cls.parse(content, path)

    @classmethod
    def parse(cls, content: dict[str, Any], path: Path) -> QuantizationConfig:
        """From a quantization_config of compressed-tensors."""
        named = content.get("config_groups") or {}
        overall = content.get("format") or "dense"
        groups = tuple(_group(name, group, overall, path) for name, group in named.items())
        return cls(
            tuple(group for group in groups if group is not None),
            tuple(content.get("ignore") or ()),
            content.get("kv_cache_scheme"),
        )

    def is_ignored(self, module: str, module_class: str | None = None) -> bool:
        """Whether `ignore` names the module, by full name, "re:" pattern or class."""
        return _best_match(self.ignore, module, module_class or class_of(module)) is not None

    def group_of(self, module: str, module_class: str | None = None) -> QuantizationGroup | None:
        """The group that a module belongs to: a full name goes before a pattern, a pattern before a class.

        `ignore` is not consulted.
        """
        module_class = module_class or class_of(module)
        found = [(_best_match(group.targets, module, module_class), group) for group in self.groups]
        ranked = sorted(((rank, place) for place, (rank, _) in enumerate(found) if rank is not None))
        return found[ranked[0][1]][1] if ranked else None


def class_of(module: str) -> str:
    """The class of a module that the names alone can tell; quantized modules are linear layers or embeddings."""
    last = module.rpartition(".")[2]
    return "Embedding" if "embed" in last or last == "wte" else "Linear"


def _best_match(targets: tuple[str, ...], module: str, module_class: str) -> int | None:
    """0 full name, 1 pattern, 2 class, None no match."""
    if module in targets:
        return 0
    if any(t.startswith("re:") and re.match(t[3:], module) for t in targets):
        return 1
    classes = (module_class, f"VocabParallel{module_class}") if module_class == "Embedding" else (module_class,)
    return 2 if any(name in targets for name in classes) else None


def _group(name: str, group: Any, overall: str, path: Path) -> QuantizationGroup | None:
    if isinstance(group, list):
        if name.upper() not in PRESETS:
            raise UnsupportedModelError(
                f"{path}: the quantization preset {name!r} is unknown; {list(PRESETS)} are known"
            )
        group = {"targets": group, **PRESETS[name.upper()]}
    if not isinstance(group, dict):
        raise CheckpointError(f"{path}: quantization group {name!r} is {type(group).__name__}, not an object")
    if not group.get("weights"):
        return None  # activations or attention only: the weights are plain
    weights = group["weights"]
    activations = group.get("input_activations")
    scheme = weight_scheme(weights, activations)
    block = weights.get("block_structure")
    if isinstance(block, str):
        block = [int(part) for part in block.split("x")]
    structure = (int(block[0]), int(block[1])) if block else None
    return QuantizationGroup(tuple(group.get("targets") or ()), scheme, group.get("format") or overall, structure)


def weight_scheme(weights: dict[str, Any], activations: dict[str, Any] | None) -> WeightScheme:
    """compressed-tensors' QuantizationArgs -> WeightScheme, with its rule for a missing strategy."""
    size = weights.get("group_size")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "group" and size in (-1, None):
        strategy = "channel"
    return WeightScheme(
        num_bits=int(weights.get("num_bits", 8)),
        type=weights.get("type", "int"),
        symmetric=bool(weights.get("symmetric", True)),
        strategy=strategy,
        group_size=int(size) if strategy == "group" and size is not None else None,
        activations=None if not activations else _activation_scheme(activations),
    )


def _activation_scheme(given: dict[str, Any]) -> ActivationScheme:
    dynamic = bool(given.get("dynamic", False))
    return ActivationScheme(
        num_bits=int(given.get("num_bits", 8)),
        type=given.get("type", "int"),
        symmetric=bool(given.get("symmetric", True)),
        strategy=given.get("strategy") or ("group" if given.get("group_size") else "tensor"),
        dynamic=dynamic,
    )
