"""Quantization schemes by name or as `config_groups`, and the group size that fits a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.errors import UserError

_INT8_TOKENS = ActivationScheme()
_FP8_TOKENS = ActivationScheme(type="float")
_FP8_TENSOR = ActivationScheme(type="float", strategy="tensor", dynamic=False)
_FP8_GROUPS = ActivationScheme(type="float", strategy="group", group_size=128)


def _presets() -> dict[str, WeightScheme]:
    """compressed-tensors' presets, as far as there are readers for what they write."""
    presets = {
        "W4A16": WeightScheme(4, group_size=128),
        "W4A16_ASYM": WeightScheme(4, group_size=128, symmetric=False),
        "W3A16": WeightScheme(3, group_size=128),
        "W8A16": WeightScheme(8, group_size=128),
        "W8A8": WeightScheme(8, strategy="channel", activations=_INT8_TOKENS),
        "W4A8": WeightScheme(4, group_size=128, activations=_INT8_TOKENS),
        "FP8": WeightScheme(8, "float", strategy="tensor", activations=_FP8_TENSOR),
        "FP8_DYNAMIC": WeightScheme(8, "float", strategy="channel", activations=_FP8_TOKENS),
        "FP8_BLOCK": WeightScheme(8, "float", strategy="block", block_structure=(128, 128), activations=_FP8_GROUPS),
        "NVFP4A16": WeightScheme(4, "float", strategy="tensor_group", group_size=16),
        "MXFP4A16": WeightScheme(4, "float", group_size=32),
    }
    for bits in (2, 5, 6, 7):
        presets[f"W{bits}A16"] = WeightScheme(bits, group_size=128)
    for bits in (2, 3, 5, 6, 7):
        presets[f"W{bits}A8"] = WeightScheme(bits, group_size=128, activations=_INT8_TOKENS)
    return presets


PRESETS = _presets()
ALIASES = {"INT8": "W8A8"}
GROUP_FALLBACKS = (128, 64, 32)

_ARGS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic")
_ONLY_EMPTY = ("actorder", "observer_kwargs")
_DERIVED = ("scale_dtype", "zp_dtype")  # follow from the rest


@dataclass(frozen=True)
class SchemeGroup:
    """Modules that `targets` name are quantized with `scheme`; `observer` is the group's own, or None."""

    targets: tuple[str, ...]
    scheme: WeightScheme
    observer: str | None = None


def preset(name: str) -> WeightScheme:
    """The scheme of a preset's name (case does not matter); UserError names those that work."""
    key = ALIASES.get(name.upper(), name.upper())
    if key in PRESETS:
        return PRESETS[key]
    works = ", ".join(PRESETS)
    raise UserError(f"unknown scheme {name!r}; the schemes that work are {works}", param="scheme")


def scheme_groups(
    scheme: str | Mapping[str, Any] | None,
    targets: tuple[str, ...],
    config_groups: Mapping[str, Any] | None,
) -> list[SchemeGroup]:
    """What a modifier's `scheme`, `targets` and `config_groups` mean; exactly one of scheme and groups is given.

    `scheme` is a preset's name or {preset name: targets}; `config_groups` is compressed-tensors' mapping of group
    name -> {targets, weights, input_activations} or group name -> list of targets for a preset of that name.
    """
    if (scheme is None) == (config_groups is None):
        raise UserError("give either scheme (for instance 'W4A16') or config_groups, not both and not neither")
    if isinstance(scheme, str):
        return [SchemeGroup(targets, preset(scheme))]
    groups: Mapping[str, Any] = scheme if scheme is not None else config_groups  # type: ignore[assignment]
    return [_group(name, value) for name, value in groups.items()]


def _group(name: str, value: Any) -> SchemeGroup:
    if isinstance(value, str | list | tuple):
        return SchemeGroup(as_tuple(value), preset(name))
    if not isinstance(value, Mapping):
        raise UserError(f"config group {name!r} must be a mapping with targets and weights, not {value!r}")
    unknown = set(value) - {"targets", "weights", "input_activations", "output_activations", "format"}
    if unknown or "targets" not in value or "weights" not in value:
        raise UserError(
            f"config group {name!r} has the keys {sorted(value)}; it takes targets, weights and input_activations"
        )
    if value.get("output_activations"):
        raise UserError(f"config group {name!r}: output_activations are not there yet; leave them out")
    weights = dict(value["weights"])
    activations = _activations(name, value.get("input_activations"))
    scheme = _weights(name, weights, activations)
    return SchemeGroup(as_tuple(value["targets"]), scheme, weights.get("observer"))


def _weights(group: str, args: Mapping[str, Any], activations: ActivationScheme | None) -> WeightScheme:
    _check_keys(group, "weights", args)
    size, block = args.get("group_size"), args.get("block_structure")
    strategy = args.get("strategy") or ("channel" if size in (None, -1) else "group")
    if strategy == "group" and size == -1:
        strategy = "channel"
    scheme = WeightScheme(
        args.get("num_bits", 8), args.get("type", "int"), args.get("symmetric", True), strategy,
        size if strategy in ("group", "tensor_group") else None, activations, None if block is None else tuple(block),
    )  # fmt: skip
    if args.get("dynamic", False) or not _is_written(scheme):
        raise UserError(f"config group {group!r}: weights {dict(args)} are not written; {_WRITTEN}")
    return scheme


_WRITTEN = (
    "what is: int of 2 to 8 bits by group or channel, symmetric or not (beside activations: symmetric); float of 8 "
    "bits by tensor, channel or block; float of 4 bits by tensor_group of 16 (NVFP4) or group of 32 (MXFP4)"
)


def _is_written(scheme: WeightScheme) -> bool:
    activations = scheme.activations
    if scheme.type == "int":
        whole = scheme.num_bits >= 2 and scheme.strategy in ("group", "channel")
        return whole and (activations is None or (scheme.symmetric and activations.type == "int"))
    if not scheme.symmetric or (activations is not None and activations.type != "float"):
        return False
    if scheme.num_bits == 8:
        return scheme.strategy in ("tensor", "channel", "block")
    small = (scheme.strategy, scheme.group_size)
    return scheme.num_bits == 4 and activations is None and small in (("tensor_group", 16), ("group", 32))


def _activations(group: str, args: Mapping[str, Any] | None) -> ActivationScheme | None:
    if not args:
        return None
    _check_keys(group, "input_activations", args)
    dynamic = args.get("dynamic", False)
    strategy = args.get("strategy") or ("tensor" if args.get("group_size") is None else "group")
    scheme = ActivationScheme(
        args.get("num_bits", 8), args.get("type", "int"), args.get("symmetric", True), strategy, bool(dynamic),
        args.get("group_size"),
    )  # fmt: skip
    shapes = [("token", True), ("tensor", False), ("tensor", True)]
    if scheme.type == "float":
        shapes.append(("group", True))
    known = scheme.num_bits == 8 and dynamic in (True, False) and (strategy, dynamic) in shapes
    # A zero point of the input is only known at run time where the scale is.
    if not known or not (scheme.symmetric or (scheme.type == "int" and scheme.dynamic)):
        raise UserError(
            f"config group {group!r}: input_activations {dict(args)} are not written; what is: 8 bits of int or float "
            "by token (dynamic) or tensor (dynamic or not), of float also by group (dynamic); symmetric, or int and "
            "dynamic"
        )
    return scheme


def _check_keys(group: str, what: str, args: Mapping[str, Any]) -> None:
    unknown = [key for key in args if key not in (*_ARGS, *_ONLY_EMPTY, *_DERIVED, "observer")]
    if unknown:
        raise UserError(f"config group {group!r}: unknown {what} keys {unknown}; known are {', '.join(_ARGS)}")
    extra = {key: args[key] for key in _ONLY_EMPTY if args.get(key)}
    if extra:
        raise UserError(f"config group {group!r}: {what} {extra} are not there yet; leave them out")


def with_group_size(scheme: WeightScheme, group_size: int) -> WeightScheme:
    """`scheme` with another group size; -1 makes it one group a channel."""
    if scheme.type == "float" or (scheme.num_bits == 8 and scheme.activations is not None):
        raise UserError(
            f"--group-size does not go with {scheme.num_bits}-bit {scheme.type} weights"
            f"{'' if scheme.activations is None else ' beside quantized activations'}: their format fixes it"
        )
    if group_size == -1:
        return replace(scheme, strategy="channel", group_size=None)
    if group_size < 2:
        raise UserError(f"group size {group_size} is not possible; use -1 (one group a row) or at least 2")
    return replace(scheme, strategy="group", group_size=group_size)


def fit_group(scheme: WeightScheme, in_features: int, out_features: int | None = None) -> WeightScheme | None:
    """`scheme` with the largest group of 128, 64, 32 below its own that divides `in_features`; None if none does.

    Blocks that do not divide a layer give way to one scale a row and a token: servers refuse them.
    """
    if scheme.block_structure is not None:
        rows, columns = scheme.block_structure
        if in_features % columns == 0 and (out_features or rows) % rows == 0:
            return scheme
        return replace(PRESETS["FP8_DYNAMIC"], activations=scheme.activations and _FP8_TOKENS)
    if scheme.group_size is None or in_features % scheme.group_size == 0:
        return scheme
    if scheme.type == "float":
        return None
    for size in GROUP_FALLBACKS:
        if size < scheme.group_size and in_features % size == 0:
            return replace(scheme, group_size=size)
    return None


def why_refitted(wanted: WeightScheme, used: WeightScheme, in_features: int) -> tuple[str, str]:
    """For the report: why a layer's scheme is not the one that was asked for, and what it has instead."""
    if wanted.block_structure is not None:
        rows, columns = wanted.block_structure
        return f"blocks of {rows} x {columns} do not divide a weight", "a scale a row"
    why = f"group size {wanted.group_size} does not divide {in_features} inputs"
    return why, str(used.group_size or "one group a row")


def as_tuple(value: str | list[str] | tuple[str, ...] | None) -> tuple[str, ...]:
    """One string or several, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
