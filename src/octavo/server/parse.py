"""From the bytes of a body to a request object, with errors that name the field, its value and what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from octavo.server.errors import ApiError, bad_request
from octavo.server.refused import LABELS, STREAM_OPTIONS, Unsupported

T = TypeVar("T", bound=msgspec.Struct)

MAX_SHOWN = 80  # characters of a value in an error message
MAX_IGNORED = 32  # names in the header that lists ignored parameters
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass
class Parsed(Generic[T]):
    request: T
    ignored: list[str] = field(default_factory=list)  # names that nobody defines

    def headers(self) -> dict[str, str]:
        if not self.ignored:
            return {}
        # Only plain names go into a header: a body must not be able to write headers.
        names = [name if _NAME.fullmatch(name) else "?" for name in self.ignored[:MAX_IGNORED]]
        more = len(self.ignored) - len(names)
        return {"x-octavo-ignored": ", ".join(names) + (f", and {more} more" if more else "")}


def parse_request(
    body: bytes, kind: type[T], unsupported: Mapping[str, Unsupported], *, strict: bool = False
) -> Parsed[T]:
    """The request in `body`. ApiError 400 for malformed JSON, wrong types, and what `unsupported` does not accept.

    Names that neither the request type nor `unsupported` knows are listed in `ignored`, or refused when `strict`.
    """
    fields = decode_object(body)
    known = set(kind.__struct_fields__)
    ignored = _check_names(fields, known, unsupported, prefix="")
    options = fields.get("stream_options")
    if "stream_options" in known and isinstance(options, dict):
        ignored += _check_names(
            options, {"include_usage", "continuous_usage_stats"}, STREAM_OPTIONS, prefix="stream_options."
        )
    if ignored and strict:
        raise bad_request(
            f"unknown parameter {shown(ignored[0])}: nobody defines it, and --strict-params refuses such",
            ignored[0][:64],
        )
    try:
        request = msgspec.convert(fields, kind, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _explain(str(error), fields) from None
    return Parsed(request, ignored)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. NaN and Infinity are let through, so that their field can be named later."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        value = _decode_python_json(body, str(error))
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _decode_python_json(body: bytes, problem: str) -> Any:
    """Python's own clients write NaN, Infinity and numbers of any size, which JSON has not."""
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # refuses half characters, which nothing after this can handle
    except (ValueError, RecursionError):
        raise bad_request(f"the body is not JSON: {problem}") from None
    return value


def _check_names(
    fields: dict[str, Any], known: set[str], unsupported: Mapping[str, Unsupported], *, prefix: str
) -> list[str]:
    ignored = []
    for name, value in fields.items():
        rule = unsupported.get(name)
        if rule is not None:
            if not rule.accepts(value):
                raise bad_request(f"{prefix}{name} is {shown(value)}: {rule.reason}", prefix + name)
        elif name not in known and name not in LABELS:
            ignored.append(prefix + name)
    return ignored


def _explain(problem: str, fields: dict[str, Any]) -> ApiError:
    """msgspec says "Expected `int | null`, got `str` - at `$.max_tokens`"; add the value."""
    missing = re.search(r"missing required field `(\w+)`", problem)
    if missing:
        return bad_request(f"{missing[1]} is missing; it is required", missing[1])
    what, _, path = problem.partition(" - at `$.")
    path = path.rstrip("`")
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    if name not in fields:
        return bad_request(f"the body does not fit: {problem}")
    return bad_request(f"{path} is {shown(fields[name])}: {what[0].lower()}{what[1:]}".replace("`", ""), name)
