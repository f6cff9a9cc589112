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
    """One message from the engine. `info` comes once, when it is ready; `failure` instead, when it cannot start.

    Most outputs of a step are one token of a running request and nothing else. Those travel as two lists, names and
    tokens, which costs a fiftieth of what objects with field names do, on the engine's critical path.
    """

    names: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outputs: list[EngineOutput] = field(default_factory=list)
    stats: EngineStats | None = None
    info: EngineInfo | None = None
    failure: Failure | None = None


@dataclass(slots=True)
class Failure:
    """Why the engine did not start: the name of the error's class in octavo.errors, and its message."""

    kind: str
    message: str


def outputs_message(outputs: list[EngineOutput], stats: EngineStats | None) -> FromEngine:
    """The message that carries a step's outputs, with the plain ones in short form.

    An output is plain when it has one token, and neither an end nor measurements. (`num_cached_tokens` does not change
    after the first output, which has measurements.)
    """
    message = FromEngine(stats=stats)
    for output in outputs:
        if (
            len(output.token_ids) == 1
            and output.finish_reason is None
            and output.stop_reason is None
            and output.queue_s is None
            and output.prefill_s is None
            and output.logprobs is None
            and output.prompt_logprobs is None
        ):
            message.names.append(output.request_id)
            message.tokens.append(output.token_ids[0])
        else:
            message.outputs.append(output)
    return message


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
encode_config = msgspec.json.encode
decode_config = msgspec.json.Decoder(EngineConfig).decode
