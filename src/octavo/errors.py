"""Errors that a user can act on. Each message states the value, the allowed range and the way out.

`Octavo` code raises these for anything a user or a client can cause; assertions are for invariants only.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of every error that Octavo raises on purpose."""


class UserError(OctavoError, ValueError):
    """The input is wrong. The server answers 400; the command exits with 1, or 2 where a setting alone is wrong."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(UserError):
    """No model of that name: no such directory, file, cached or reachable Hub repository."""


class CheckpointError(UserError):
    """A checkpoint is broken: a tensor is missing, has the wrong shape, or a file is truncated."""


class UnsupportedModelError(UserError):
    """The architecture or the quantization cannot be served right, so it is not served at all."""


class CapacityError(UserError):
    """Something does not fit: a prompt in the context, or a sequence in the KV cache."""


class QueueFullError(OctavoError):
    """The server holds as many requests as it may; the client should retry later (503)."""


class EngineDeadError(OctavoError):
    """The engine process ended; its requests are lost and the server must be restarted."""
