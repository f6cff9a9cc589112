"""Encoding of the messages between the server and the engine process (msgpack by msgspec)."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from octavo.engine.config import EngineConfig
from octavo.engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats


@dataclass(slots=True)
class ToEngine:
    """One message to the engine; any number of the fields may be set."""

    add: list[EngineRequest] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)
    finish: list[tuple[str, int | str | None]] = field(default_factory=list)
    is_shutdown: bool = False


@dataclass(slots=True)
class FromEngine:
    """One message from the engine. `info` comes once, when it is ready; `failure` instead, when it cannot start."""

    outputs: list[EngineOutput] = field(default_factory=list)
    stats: EngineStats | None = None
    info: EngineInfo | None = None
    failure: Failure | None = None


@dataclass(slots=True)
class Failure:
    """Why the engine did not start: the name of the error's class in octavo.errors, and its message."""

    kind: str
    message: str


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
encode_config = msgspec.json.encode
decode_config = msgspec.json.Decoder(EngineConfig).decode
