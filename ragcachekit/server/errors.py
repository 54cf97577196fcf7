"""Errors in the form of the API that was called, and bodies of requests read."""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from jinja2 import TemplateError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from ragcachekit.errors import (
    Closed,
    DeadlineExceeded,
    GenerationNotSupported,
    PromptTooLong,
    QueueFull,
    RagCacheError,
)

log = logging.getLogger(__name__)

RETRY_AFTER = 1.0
"""Seconds that clients wait while there is no room or the server stops."""

_GOOGLE = {
    **{401: "UNAUTHENTICATED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED"},
    **{501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED", 507: "RESOURCE_EXHAUSTED"},
}
_ANTHROPIC = {
    **{400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"},
}
_HEAD, _TAIL = 300, 100  # characters
_TYPES = ("str", "int", "float", "bool", "Document")  # tags of a union's members
_Body = TypeVar("_Body", bound=BaseModel)


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
        self.retry_after, self.headers = retry_after, dict(headers or {})
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

    def anthropic_body(self) -> dict[str, Any]:
        """The response's JSON, or an event of a stream, in the form of Anthropic's API."""
        kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}


def _shortened(text: str) -> str:
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}…{text[-_TAIL:]}"


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A request that is wrong in itself: 400."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """A parameter that this server does not support: 400."""
    return invalid(message, param, "unsupported_parameter")


def overloaded(message: str) -> ApiError:
    """No room for the request now: 503."""
    return ApiError(503, message, kind="server_error", code="overloaded", retry_after=RETRY_AFTER)


def stopping() -> ApiError:
    """The server is stopping: 503."""
    return overloaded("The server is stopping; please try again.")


def api_path(scope: Scope) -> str | None:
    """The path of an API request, ``/v1...``, without the mount point; None for other requests."""
    if scope["type"] != "http":
        return None
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return path if path.startswith("/v1") else None


def api_error(error: Exception, scope: Scope) -> ApiError:
    """The response for an error of a request; 500 for a bug, which is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        known = {404: "Invalid URL", 405: "Not allowed to use this method"}
        what = known.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, f"{what} ({scope['method']} {scope['path']})")
    if isinstance(error, QueueFull):
        return overloaded("The engine is overloaded; please try again later.")
    if isinstance(error, Closed):
        return stopping()
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, "The request timed out.", kind="server_error", code="timeout")
    if _is_full(error):
        log.error("the volume is full: %s", error)
        message = "The server's volume is full: nothing was stored, and what was stored before is unchanged."
        return ApiError(507, message, kind="server_error", code="insufficient_storage")
    if isinstance(error, PromptTooLong):
        names = {"/v1/completions": "prompt", "/v1/responses": "input"}
        param = names.get(api_path(scope) or "", "messages")
        return invalid(str(error), param, "context_length_exceeded")
    if isinstance(error, GenerationNotSupported | ImportError):  # an extra that is not installed
        return invalid(str(error), code="unsupported_parameter")
    if isinstance(error, ValueError | TypeError | TemplateError):
        return invalid(str(error) or type(error).__name__, code=None)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "The server had an error while processing your request.", kind="server_error")


def _is_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, means that there is no space left."""
    while error is not None and getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        error = error.__cause__
    return error is not None


def body_of(error: ApiError, scope: Scope) -> dict[str, Any]:
    """The JSON of an error: in Google's form for ``/v1beta``, Anthropic's for messages, else OpenAI's."""
    path = api_path(scope) or ""
    if path.startswith("/v1beta"):
        return error.google_body()
    return error.anthropic_body() if path.startswith("/v1/messages") else error.body()


def response(error: ApiError, scope: Scope) -> JSONResponse:
    """The response of an error."""
    return JSONResponse(body_of(error, scope), error.status, error.headers)


def add_handlers(app: FastAPI) -> None:
    """Answer every error of the application's routes as :func:`response`."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return response(api_error(error, request.scope), request.scope)

    kinds = (HTTPException, ApiError, RagCacheError, OSError, ValueError, TypeError, TemplateError)
    for kind in (*kinds, ImportError, Exception):  # starlette logs and raises what only Exception covers
        app.add_exception_handler(kind, handle)


async def parsed(request: Request, model: type[_Body]) -> _Body:
    """The request's JSON body as a pydantic model; ApiError 400 names what is wrong, and where."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise _refused(error) from None


def _refused(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a union, the error of the member that fits best.
    same = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    first = max(same, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
    kind, message, param = first["type"], first["msg"], ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif not param or (part.isidentifier() and part not in _TYPES):
            param += f".{part}" if param else part
    if kind == "json_invalid" and not param:
        return invalid(f"We could not parse the JSON body of your request: {message}", code=None)
    if kind == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {param}", code=None)
    if kind == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if kind == "unsupported_value":
        return invalid(f"Unsupported value: '{param}' does not support this value.", param, kind)
    wrong, code = ("type", "invalid_type") if kind.endswith("_type") else ("value", "invalid_value")
    return invalid(f"Invalid {wrong} for '{param}': {message}.", param or None, code)
