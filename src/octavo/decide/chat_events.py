"""The text in the server-sent events of a streamed chat answer."""

from __future__ import annotations

import json

from octavo.errors import OctavoError


def text_of(line: str) -> str | None:
    """What one line of the stream adds to the answer: "" for lines without text, None for the [DONE] that ends it.

    OctavoError when the server reports an error inside the stream, or sends something other than a chat chunk.
    """
    if not line.startswith("data:"):
        return ""  # blank separators, comments, event names
    data = line[5:].strip()
    if data == "[DONE]":
        return None
    try:
        event = json.loads(data)
        if "error" not in event:
            return "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices") or [])
        error = event["error"]
    except (ValueError, AttributeError, TypeError) as problem:
        raise OctavoError(f"the server's stream holds something other than a chat chunk: {data[:80]!r}") from problem
    raise OctavoError(f"the server broke off: {error.get('message', error) if isinstance(error, dict) else error}")
