"""Errors of the server, in OpenAI's form."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error response: ``{"error": {"message", "type", "param", "code"}}`` with an HTTP status.

    ``retry_after``: seconds for the ``Retry-After`` header, of 429 and 503.
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
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}


def overloaded(message: str, retry_after: float) -> ApiError:
    """The response while there is no room; ``retry_after`` in seconds."""
    return ApiError(503, message, kind="server_error", code="overloaded", retry_after=retry_after)


def stopping(retry_after: float = 1.0) -> ApiError:
    """The response while the server stops."""
    return overloaded("The server is stopping; please try again.", retry_after)
