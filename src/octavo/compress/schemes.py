"""Quantization schemes by name or as `config_groups`, and the group size that fits a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.errors import UserError

PRESETS: dict[str, WeightScheme] = {
    "W4A16": WeightScheme(num_bits=4, strategy="group", group_size=128),
    "W8A16": WeightScheme(num_bits=8, strategy="group", group_size=128),
    "W8A8": WeightScheme(num_bits=8, strategy="channel", activations=ActivationScheme()),
}
ALIASES = {"INT8": "W8A8"}
NOT_YET = ("W4A16_ASYM", "W3A16", "W4A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16")
GROUP_FALLBACKS = (128, 64, 32)

_ARGS = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic")
_ONLY_EMPTY = ("block_structure", "actorder", "scale_dtype", "zp_dtype", "observer_kwargs")


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
    if key in NOT_YET:
        raise UserError(f"scheme {name!r} is not there yet; the schemes that work are {works}", param="scheme")
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
    bits, kind = args.get("num_bits", 8), args.get("type", "int")
    size = args.get("group_size")
    strategy = args.get("strategy") or ("channel" if size in (None, -1) else "group")
    works = "4 or 8 bits, type int, symmetric, strategy group or channel (8 bits with activations: channel)"
    ok = bits in (4, 8) and kind == "int" and args.get("symmetric", True) and not args.get("dynamic", False)
    ok = ok and strategy in ("group", "channel") and (activations is None or (bits == 8 and strategy == "channel"))
    if not ok:
        raise UserError(f"config group {group!r}: weights {dict(args)} are not there yet; what works: {works}")
    return WeightScheme(bits, strategy=strategy, group_size=size if strategy == "group" else None,
                        activations=activations)  # fmt: skip


def _activations(group: str, args: Mapping[str, Any] | None) -> ActivationScheme | None:
    if not args:
        return None
    _check_keys(group, "input_activations", args)
    dynamic_token = args.get("strategy", "token") == "token" and args.get("dynamic", False) is True
    if args.get("num_bits", 8) != 8 or args.get("type", "int") != "int" or not dynamic_token:
        raise UserError(
            f"config group {group!r}: input_activations {dict(args)} are not there yet; "
            "what works: 8 bits, type int, strategy token, dynamic true, symmetric"
        )
    if not args.get("symmetric", True):
        raise UserError(f"config group {group!r}: asymmetric input_activations are not there yet; use symmetric")
    return ActivationScheme()


def _check_keys(group: str, what: str, args: Mapping[str, Any]) -> None:
    unknown = [key for key in args if key not in (*_ARGS, *_ONLY_EMPTY, "observer")]
    if unknown:
        raise UserError(f"config group {group!r}: unknown {what} keys {unknown}; known are {', '.join(_ARGS)}")
    extra = {key: args[key] for key in _ONLY_EMPTY if args.get(key)}
    if extra:
        raise UserError(f"config group {group!r}: {what} {extra} are not there yet; leave them out")


def with_group_size(scheme: WeightScheme, group_size: int) -> WeightScheme:
    """`scheme` with another group size; -1 makes it one group a channel."""
    if scheme.activations is not None:
        raise UserError("--group-size does not go with activation quantization: int8 activations need one scale a row")
    if group_size == -1:
        return replace(scheme, strategy="channel", group_size=None)
    if group_size < 2:
        raise UserError(f"group size {group_size} is not possible; use -1 (one group a row) or at least 2")
    return replace(scheme, strategy="group", group_size=group_size)


def fit_group(scheme: WeightScheme, in_features: int) -> WeightScheme | None:
    """`scheme` with the largest group of 128, 64, 32 below its own that divides `in_features`; None if none does."""
    if scheme.group_size is None or in_features % scheme.group_size == 0:
        return scheme
    for size in GROUP_FALLBACKS:
        if size < scheme.group_size and in_features % size == 0:
            return replace(scheme, group_size=size)
    return None


def as_tuple(value: str | list[str] | tuple[str, ...] | None) -> tuple[str, ...]:
    """One string or several, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
