"""Who does what: each linear layer of a model, the modifiers that change it, and the scheme that fits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.blocks import Blocks
from octavo.compress.experts import routers
from octavo.compress.kv_scales import check_kv_cache_scheme
from octavo.compress.modifiers.base import LayerModifier, Modifier, Pruner, Quantizer, Transform
from octavo.compress.schemes import fit_group, why_refitted
from octavo.errors import UserError

_Refitted = dict[tuple[str, str], int]  # (why not the scheme that was asked for, what instead) -> layers


@dataclass(frozen=True)
class Assignment:
    """What happens to a layer: pruners in order, then a quantizer with its scheme (None, None: it stays dense)."""

    pruners: tuple[Pruner, ...] = ()
    quantizer: Quantizer | None = None
    scheme: WeightScheme | None = None
    observer: str | None = None

    @property
    def modifiers(self) -> tuple[LayerModifier, ...]:
        """All that work on the layer, in order."""
        return self.pruners if self.quantizer is None else (*self.pruners, self.quantizer)

    @property
    def statistics(self) -> frozenset[str]:
        """What they need to know of its inputs."""
        return frozenset().union(*(modifier.statistics for modifier in self.modifiers))


@dataclass
class Plan:
    """`layers` maps the full name of each layer that changes to its assignment; `dense` names the linear layers that
    are not quantized; `transforms` come before both."""

    layers: dict[str, Assignment] = field(default_factory=dict)
    dense: list[str] = field(default_factory=list)
    transforms: list[Transform] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kv_cache_scheme: dict[str, Any] | None = None  # as config.json has it; None: no scales for the KV cache

    def schemes(self) -> dict[str, WeightScheme]:
        """The scheme of every layer that is quantized."""
        return {name: a.scheme for name, a in self.layers.items() if a.scheme is not None}

    def needs_data(self) -> bool:
        """Whether anything has to be calibrated."""
        if self.kv_cache_scheme is not None or any(transform.calibrated for transform in self.transforms):
            return True
        return any(assignment.statistics for assignment in self.layers.values())


def make_plan(model: Any, blocks: Blocks, modifiers: Sequence[Modifier]) -> Plan:
    """Ask every modifier for every linear layer.

    UserError when two quantizers want the same layer, none of the modifiers wants any, or no group size fits.
    """
    transforms = [modifier for modifier in modifiers if isinstance(modifier, Transform)]
    plan = Plan(dense=list(routers(model)), transforms=transforms)
    modules = dict(model.named_modules())
    for modifier in modifiers:
        plan.notes += modifier.unused_patterns(modules)
    inside = {name for index in range(len(blocks.modules)) for name, _ in blocks.linears(index)}
    refitted: _Refitted = {}
    for name, module in modules.items():
        if not isinstance(module, nn.Linear) or name in plan.dense:
            continue
        assignment = _assign(name, module, modifiers, refitted)
        if assignment.modifiers and name not in inside:
            plan.notes.append(_outside(model, name, module))
            assignment = Assignment()
        if assignment.modifiers:
            plan.layers[name] = assignment
        if assignment.quantizer is None:
            plan.dense.append(name)
    if not plan.layers and not plan.transforms:
        raise UserError("the recipe's targets match no linear layer of this model, so there is nothing to compress")
    _refuse_useless_groups(plan, modules)
    plan.kv_cache_scheme = _kv_cache_scheme(modifiers)
    plan.notes += [f"{why}: {count} layers use {instead} instead" for (why, instead), count in refitted.items()]
    for transform in plan.transforms:
        transform.follow(plan.layers)
        plan.notes += transform.prepare(model, blocks)
    return plan


def _kv_cache_scheme(modifiers: Sequence[Modifier]) -> dict[str, Any] | None:
    """The one scheme that quantizers ask for, if any does."""
    asked = [m.kv_cache_scheme for m in modifiers if isinstance(m, Quantizer) and m.kv_cache_scheme is not None]
    schemes = [check_kv_cache_scheme(scheme) for scheme in asked]
    if any(scheme != schemes[0] for scheme in schemes):
        raise UserError(f"two quantizers ask for different KV cache schemes: {schemes[0]} and {schemes[1]}")
    return schemes[0] if schemes else None


def _refuse_useless_groups(plan: Plan, modules: dict[str, nn.Module]) -> None:
    """A preset's group size gives way to a smaller one; one that was asked for and fits no layer is a mistake."""
    inputs: dict[int, list[int]] = {}
    for name, assignment in plan.layers.items():
        size = None if assignment.quantizer is None else assignment.quantizer.group_size
        if size is not None:
            inputs.setdefault(size, []).append(modules[name].in_features)  # type: ignore[arg-type]
    for size, columns in inputs.items():
        if all(count % size for count in columns):
            raise UserError(
                f"group size {size} divides the inputs of no layer; they have "
                f"{', '.join(map(str, sorted(set(columns))))}. Give a divisor, or -1 (one group a row)",
                param="group_size",
            )


def _assign(name: str, module: nn.Linear, modifiers: Sequence[Modifier], refitted: _Refitted) -> Assignment:
    pruners = tuple(m for m in modifiers if isinstance(m, Pruner) and m.claim(name, module))
    quantizers = [m for m in modifiers if isinstance(m, Quantizer)]
    claims = [(modifier, group) for modifier in quantizers if (group := modifier.claim(name, module)) is not None]
    if not claims:
        return Assignment(pruners)
    if len(claims) > 1:
        both = " and ".join(type(modifier).__name__ for modifier, _ in claims)
        raise UserError(f"{name} is a target of {both}; narrow targets or ignore so that one of them has it")
    modifier, group = claims[0]
    scheme = fit_group(group.scheme, module.in_features, module.out_features)
    if scheme is None:
        raise UserError(
            f"{name} has {module.in_features} inputs, which group size {group.scheme.group_size} does not divide and "
            "neither do 128, 64 or 32; ignore that layer, or use group size -1 (one group a row)"
        )
    if scheme != group.scheme:
        key = why_refitted(group.scheme, scheme, module.in_features)
        refitted[key] = refitted.get(key, 0) + 1
    return Assignment(pruners, modifier, scheme, group.observer)


def _outside(model: Any, name: str, module: nn.Linear) -> str:
    embedding = model.get_input_embeddings()
    if embedding is not None and getattr(module, "weight", None) is embedding.weight:
        return f"{name} shares its weight with the input embeddings, so it stays unquantized and tied"
    return f"{name} lies outside the decoder blocks and stays unquantized"
