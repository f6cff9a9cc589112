"""Who does what: each linear layer of a model, the modifier that quantizes it, and the scheme that fits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.blocks import Blocks
from octavo.compress.modifiers.base import Modifier
from octavo.compress.schemes import fit_group
from octavo.errors import UserError


@dataclass(frozen=True)
class Assignment:
    """A layer's modifier and the scheme that it is quantized with."""

    modifier: Modifier
    scheme: WeightScheme
    observer: str | None


@dataclass
class Plan:
    """`layers` maps the full name of each layer to be quantized; `dense` names the linear layers that are not."""

    layers: dict[str, Assignment] = field(default_factory=dict)
    dense: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def make_plan(model: Any, blocks: Blocks, modifiers: Sequence[Modifier]) -> Plan:
    """Ask every modifier for every linear layer. UserError when two want the same, none wants any, or no group fits."""
    plan = Plan()
    modules = dict(model.named_modules())
    for modifier in modifiers:
        plan.notes += modifier.unused_patterns(modules)
    inside = {name for index in range(len(blocks.modules)) for name, _ in blocks.linears(index)}
    refitted: dict[tuple[int | None, int | None, int], int] = {}
    for name, module in modules.items():
        if not isinstance(module, nn.Linear):
            continue
        assignment = _assign(name, module, modifiers, refitted)
        if assignment is not None and name not in inside:
            plan.notes.append(_outside(model, name, module))
            assignment = None
        if assignment is None:
            plan.dense.append(name)
        else:
            plan.layers[name] = assignment
    if not plan.layers:
        raise UserError("the recipe's targets match no linear layer of this model, so there is nothing to compress")
    for modifier in modifiers:
        _refuse_useless_group(modifier, [m.in_features for n, m in modules.items()
                                         if n in plan.layers and plan.layers[n].modifier is modifier])  # fmt: skip
    plan.notes += [
        f"group size {wanted} does not divide {columns} inputs: {count} layers use {used or 'one group a row'} instead"
        for (wanted, used, columns), count in refitted.items()
    ]
    return plan


def _refuse_useless_group(modifier: Modifier, inputs: list[int]) -> None:
    """A preset's group size gives way to a smaller one; one that was asked for and fits no layer is a mistake."""
    if modifier.group_size is not None and inputs and all(columns % modifier.group_size for columns in inputs):
        raise UserError(
            f"group size {modifier.group_size} divides the inputs of no layer; they have "
            f"{', '.join(map(str, sorted(set(inputs))))}. Give a divisor, or -1 (one group a row)",
            param="group_size",
        )


def _assign(
    name: str, module: nn.Linear, modifiers: Sequence[Modifier], refitted: dict[tuple[int | None, int | None, int], int]
) -> Assignment | None:
    claims = [(modifier, group) for modifier in modifiers if (group := modifier.claim(name, module)) is not None]
    if not claims:
        return None
    if len(claims) > 1:
        both = " and ".join(type(modifier).__name__ for modifier, _ in claims)
        raise UserError(f"{name} is a target of {both}; narrow targets or ignore so that one of them has it")
    modifier, group = claims[0]
    scheme = fit_group(group.scheme, module.in_features)
    if scheme is None:
        raise UserError(
            f"{name} has {module.in_features} inputs, which group size {group.scheme.group_size} does not divide and "
            "neither do 128, 64 or 32; ignore that layer, or use group size -1 (one group a row)"
        )
    if scheme != group.scheme:
        key = (group.scheme.group_size, scheme.group_size, module.in_features)
        refitted[key] = refitted.get(key, 0) + 1
    return Assignment(modifier, scheme, group.observer)


def _outside(model: Any, name: str, module: nn.Linear) -> str:
    embedding = model.get_input_embeddings()
    if embedding is not None and getattr(module, "weight", None) is embedding.weight:
        return f"{name} shares its weight with the input embeddings, so it stays unquantized and tied"
    return f"{name} lies outside the decoder blocks and stays unquantized"
