"""What goes wrong, as clients see it: OpenAI's error object, with vLLM's type names, and the right status."""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.errors import EngineDeadError, OctavoError, QueueFullError, UserError

MAX_MESSAGE_CHARS = 2000  # an error that quotes its input must not be larger than the input

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


@dataclass
class ApiError(Exception):
    """An answer other than 200. `code` defaults to the status, as vLLM's does."""

    status: int
    message: str
    param: str | None = None
    code: str | int | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[:MAX_MESSAGE_CHARS] + f"... ({len(self.message) - MAX_MESSAGE_CHARS} more characters)"
        return {
            "error": {
                "message": message,
                "type": _TYPES.get(self.status) or HTTPStatus(self.status).phrase,
                "param": self.param,
                "code": self.status if self.code is None else self.code,
            }
        }

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body())

    def response(self) -> Response:
        return Response(self.encoded(), self.status, headers=self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError | None:
    """The answer to an exception that a request met; None means that it is a bug (500, with a traceback in the log)."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        retry_after = getattr(error, "retry_after", 1)
        return ApiError(503, str(error), headers={"Retry-After": str(retry_after)})
    if isinstance(error, UserError):
        return bad_request(str(error), error.param)
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"{error}; restart the server" if str(error) else "the engine died; restart the server")
    if isinstance(error, OctavoError):  # the engine gave this one request up, and says why
        return ApiError(500, str(error))
    return None


def internal_error(error: BaseException) -> ApiError:
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log has the details")
