"""Text to typed values: what a flag, an environment variable or a YAML key may hold.

Whole numbers take the suffixes that `vllm serve` takes: k, m, g, t are powers of 1,000 and K, M, G, T powers of 1,024
(`25.6k` is 25,600; `4K` is 4,096); `4GB` and `4GiB` work too.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union

_SIZE = re.compile(r"(?P<number>[+-]?\d+(?:\.\d+)?)\s*(?:(?P<suffix>[kKmMgGtT])(?P<unit>i?[bB])?)?")
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


class ValueProblem(Exception):
    """The value does not fit the field; the message says what would, without naming the flag."""


def human_int(text: str) -> int:
    """`4096`, `4k`, `4K`, `25.6k`, `2GiB` as a whole number; ValueProblem when it is none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueProblem(f"{text!r} is not a whole number; write for example 4096, 4k (4,000), 4K (4,096) or 2GiB")
    number, suffix, unit = match["number"], match["suffix"], match["unit"]
    if suffix is None:
        factor = 1
    elif unit is None:
        factor = (1000 if suffix.islower() else 1024) ** _POWER[suffix.lower()]
    else:
        factor = (1024 if unit[0] == "i" else 1000) ** _POWER[suffix.lower()]
    whole, _, fraction = number.partition(".")
    scaled = int(whole + fraction) * factor
    value, rest = divmod(scaled, 10 ** len(fraction))
    if rest:
        raise ValueProblem(f"{text!r} is {scaled / 10 ** len(fraction):,}, which is not a whole number")
    return value


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type itself."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def is_bool(hint: Any) -> bool:
    """True for `bool` and `bool | None`: fields whose flag has a --no- form."""
    return {m for m in members(hint) if m is not type(None)} == {bool}


def element_type(hint: Any) -> Any | None:
    """The type of the elements when `hint` is a list or a tuple (or one of those or None), else None."""
    for member in members(hint):
        if typing.get_origin(member) in (list, tuple, Sequence):
            return (typing.get_args(member) or (str,))[0]
        if member in (list, tuple):
            return str
    return None


def allowed_values(hint: Any, choices: Sequence[str] | None) -> tuple[str, ...]:
    """The closed set of values that the field takes; empty when it is open."""
    if choices:
        return tuple(choices)
    kinds = [m for m in members(hint) if m is not type(None)]
    if kinds and all(typing.get_origin(m) is Literal for m in kinds):
        return tuple(str(v) for m in kinds for v in typing.get_args(m))
    return ()


def split_list(text: str) -> list[str]:
    """Split at commas that are not inside brackets, so that `re:a{1,2}` stays whole."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth <= 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def convert(value: Any, hint: Any, choices: Sequence[str] | None = None) -> Any:
    """`value` (text, or what YAML made of it) as the type `hint`; ValueProblem says what would be right."""
    kinds = members(hint)
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null") and str not in kinds):
        if type(None) in kinds:
            return None
        raise ValueProblem("a value is needed")
    element = element_type(hint)
    if element is not None and not (isinstance(value, str) and str in kinds and choices and value in choices):
        return _convert_list(value, hint, element, choices)
    allowed = allowed_values(hint, choices)
    if allowed:
        return _convert_choice(value, hint, allowed)
    return _convert_open(value, [kind for kind in kinds if kind is not type(None)])


def _convert_list(value: Any, hint: Any, element: Any, choices: Sequence[str] | None) -> Any:
    values = value if isinstance(value, (list, tuple)) else [value]
    parts = [part for v in values for part in (split_list(v) if isinstance(v, str) else [v])]
    made = [convert(part, element, choices) for part in parts]
    is_tuple = any(kind is tuple or typing.get_origin(kind) is tuple for kind in members(hint))
    return tuple(made) if is_tuple else made


def _convert_choice(value: Any, hint: Any, allowed: tuple[str, ...]) -> Any:
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)
    if text not in allowed:
        raise ValueProblem(f"{text!r} is none of {', '.join(allowed)}")
    literals = {str(v): v for m in members(hint) if typing.get_origin(m) is Literal for v in typing.get_args(m)}
    if text in literals:
        return literals[text]
    return human_int(text) if int in members(hint) and re.fullmatch(r"-?\d+", text) else text


def _convert_open(value: Any, kinds: list[Any]) -> Any:
    """Try the members of a union from the most to the least particular; the last problem is the one reported."""
    order = [bool, int, float, dict, Literal, Path, str]
    ranked = sorted(kinds, key=lambda k: next((i for i, o in enumerate(order) if o in (k, typing.get_origin(k))), 9))
    problems = []
    for kind in ranked:
        try:
            return _convert_one(value, kind)
        except ValueProblem as problem:
            problems.append(str(problem))
    raise ValueProblem(problems[0] if len(problems) == 1 else "; or: ".join(problems))


def _convert_one(value: Any, kind: Any) -> Any:
    if kind is bool:
        return _convert_bool(value)
    if kind is int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueProblem(f"{value!r} is not a whole number")
        return int(value) if isinstance(value, (int, float)) else human_int(str(value))
    if kind is float:
        return _convert_float(value)
    if kind is dict or typing.get_origin(kind) is dict:
        return _convert_dict(value)
    if typing.get_origin(kind) is Literal:
        allowed = {str(v): v for v in typing.get_args(kind)}
        if str(value) not in allowed:
            raise ValueProblem(f"{value!r} is none of {', '.join(allowed)}")
        return allowed[str(value)]
    if kind is Path:
        return Path(str(value)).expanduser()
    if kind is str or kind is Any:
        return value if isinstance(value, str) else str(value)
    raise TypeError(f"a setting cannot have the type {kind!r}")


def _convert_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in _TRUE | _FALSE:
        raise ValueProblem(f"{value!r} is neither true nor false; write 1, true, yes, on or 0, false, no, off")
    return text in _TRUE


def _convert_float(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueProblem(f"{value!r} is not a number") from None
    if isinstance(value, bool) or number != number:
        raise ValueProblem(f"{value!r} is not a number")
    return number


def _convert_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueProblem(f"{value!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueProblem(f'{value!r} is not a JSON object such as {{"key": 1}}')
    return value
