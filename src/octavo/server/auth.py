"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

OPEN_PATHS = frozenset({"/health", "/version"})
METRICS_PATH = "/metrics"


class KeyRing:
    """The keys that open the server; with none, everybody may come in.

    Only digests are kept, and all of them are compared in constant time, so that neither a dump of the process nor the
    time of an answer tells a key.
    """

    def __init__(self, keys: Iterable[str] | None, *, protect_metrics: bool = False) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys or ()]
        self._open = OPEN_PATHS if protect_metrics else OPEN_PATHS | {METRICS_PATH}

    def admits(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request for `path` with these ASGI headers (lower-case names) may pass."""
        if not self._digests or path in self._open:
            return True
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)
