"""Errors of the server, in OpenAI's form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_GOOGLE = {
    **{401: "UNAUTHENTICATED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED"},
    **{501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED", 507: "RESOURCE_EXHAUSTED"},
}
_HEAD, _TAIL = 300, 100  # characters

RETRY_AFTER = 1.0
"""Seconds that clients wait while there is no room or the server stops."""


class ApiError(Exception):
    """An error response: ``{"error": {"message", "type", "param", "code"}}`` with an HTTP status.

    Long messages and params, which repeat what the client sent, are cut in the middle. ``retry_after`` is in
    seconds, for the ``Retry-After`` header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(_shortened(message))
        self.status, self.kind, self.code = status, kind, code
        self.param = None if param is None else _shortened(param)
        self.retry_after = retry_after
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def google_body(self) -> dict[str, Any]:
        """The response's JSON in the form of Google's APIs."""
        name = _GOOGLE.get(self.status, "INVALID_ARGUMENT" if self.status < 500 else "INTERNAL")
        return {"error": {"code": self.status, "message": str(self), "status": name}}


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A request that is wrong in itself: 400."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """A parameter that this server does not support: 400."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def overloaded(message: str) -> ApiError:
    """No room for the request now: 503."""
    return ApiError(503, message, kind="server_error", code="overloaded", retry_after=RETRY_AFTER)


def stopping() -> ApiError:
    """The server is stopping: 503."""
    return overloaded("The server is stopping; please try again.")


def _shortened(text: str) -> str:
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}…{text[-_TAIL:]}"
