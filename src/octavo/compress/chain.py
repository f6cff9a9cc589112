"""Which modifiers go together, and in which order.

=====================  =====================================================================================
before                 after
=====================  =====================================================================================
rotation R1, R2        SmoothQuant, AWQ, pruners, quantizers
rotation R4, QuIP      pruners, quantizers; no scaling of channels, which a rotation at run time would mix up
SmoothQuant or AWQ     pruners, quantizers (AWQ needs one); not a rotation, which would undo it
pruners                quantizers, and other pruners, which keep the zeros
quantizers             quantizers with other layers
=====================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from octavo.compress.modifiers.base import Modifier, Pruner, Quantizer, Transform
from octavo.compress.modifiers.magnitude import ConstantPruningModifier
from octavo.compress.modifiers.owl import OWLModifier
from octavo.compress.modifiers.quip import QuIPModifier
from octavo.compress.modifiers.spinquant import SpinQuantModifier
from octavo.errors import UserError

_ORDER: tuple[tuple[type[Modifier], str], ...] = (
    (Transform, "mixes or scales the weights that pruners choose among and quantizers give codes"),
    (Pruner, "zeroes weights that a quantizer would have given codes"),
    (Quantizer, ""),
)
_ROTATIONS = (SpinQuantModifier, QuIPModifier)


def check_chain(modifiers: Sequence[Modifier]) -> None:
    """UserError, with the reason and a way out, for modifiers that make no sense together or in this order."""
    transforms = [modifier for modifier in modifiers if isinstance(modifier, Transform)]
    for problems in (_misplaced(modifiers), _clashing(transforms), _useless(modifiers, transforms)):
        for problem in problems:
            raise UserError(problem, param="recipe")


def _misplaced(modifiers: Sequence[Modifier]) -> Iterator[str]:
    for first, second in pairwise(modifiers):
        if _place(first) > _place(second):
            yield (
                f"{_name(second)} comes after {_name(first)}, but it {_ORDER[_place(second)][1]}; "
                f"put {_name(second)} before {_name(first)}"
            )


def _place(modifier: Modifier) -> int:
    return next(place for place, (kind, _) in enumerate(_ORDER) if isinstance(modifier, kind))


def _clashing(transforms: Sequence[Transform]) -> Iterator[str]:
    names = [_name(transform) for transform in transforms]
    for name in names:
        if names.count(name) > 1:
            yield f"the recipe has {names.count(name)} of {name}; one does all, leave the others out"
    rotations = [transform for transform in transforms if isinstance(transform, _ROTATIONS)]
    scalings = [transform for transform in transforms if not isinstance(transform, _ROTATIONS)]
    online = [transform for transform in rotations if _runs_online(transform)]
    if len(scalings) > 1:
        yield (
            f"{' and '.join(map(_name, scalings))} scale the same channels, and the later one would undo what the "
            "earlier one chose; leave one of them out"
        )
    if len(online) > 1:
        yield "SpinQuantModifier's R4 and QuIPModifier both rotate the input of the down projections; leave R4 out"
    if scalings and online:
        yield (
            f"{_name(scalings[0])} moves scales from a layer into the one before, but {_name(online[0])} rotates what "
            "is between the two at run time, which would change the model; leave one of them out (SpinQuantModifier's "
            "R1 and R2 go with it)"
        )
    if scalings and rotations and transforms.index(rotations[-1]) > transforms.index(scalings[0]):
        yield (
            f"{_name(rotations[-1])} comes after {_name(scalings[0])} and would mix the channels that it scaled; put "
            "the rotation first"
        )


def _runs_online(transform: Transform) -> bool:
    return isinstance(transform, QuIPModifier) or "R4" in getattr(transform, "rotations", ())


def _useless(modifiers: Sequence[Modifier], transforms: Sequence[Transform]) -> Iterator[str]:
    quantizes = any(isinstance(modifier, Quantizer) for modifier in modifiers)
    if not quantizes and any(_name(transform) == "AWQModifier" for transform in transforms):
        yield (
            "AWQModifier looks for the scales that suit a quantizer, but none follows it; add a QuantizationModifier "
            "or a GPTQModifier"
        )
    rotations = [_name(transform) for transform in transforms if isinstance(transform, _ROTATIONS)]
    for pruner in modifiers:
        keeps = isinstance(pruner, ConstantPruningModifier) or getattr(pruner, "preserve_sparsity_mask", False)
        if keeps and rotations:
            yield (
                f"{_name(pruner)} is to keep the zeros that the model has, but {rotations[0]} mixes them with other "
                "weights; leave one of them out"
            )
        if isinstance(pruner, OWLModifier) and pruner.has_profile and transforms:
            yield (
                f"sparsity_profile 'owl' of {_name(pruner)} looks at the model as it comes, which "
                f"{_name(transforms[0])} changes; leave one of them out"
            )


def _name(modifier: Modifier) -> str:
    return type(modifier).__name__
