"""Bodies of requests read, and errors answered, in the form of the API that was called."""

from __future__ import annotations

import logging
import re
from typing import TypeVar

from fastapi import FastAPI, Request
from jinja2 import TemplateError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from ragcachekit.errors import Closed, DeadlineExceeded, GenerationNotSupported, PromptTooLong, QueueFull
from ragcachekit.server.errors import ApiError, invalid, overloaded, stopping
from ragcachekit.store.disk import is_full

log = logging.getLogger(__name__)

_Body = TypeVar("_Body", bound=BaseModel)
_FIELD = re.compile(r"[a-z_][A-Za-z_]*")
_TYPES = ("str", "int", "float", "bool")  # tags of a union's members


def api_path(scope: Scope) -> str | None:
    """The path of an API request, ``/v1...``, without the mount point; None for other requests."""
    if scope["type"] != "http":
        return None
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return path if path.startswith("/v1") else None


async def parsed(request: Request, model: type[_Body]) -> _Body:
    """The request's JSON body as a pydantic model; ApiError 400 names what is wrong and where."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise _refused(error) from None


def _refused(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a union's errors, that of the member which fits best.
    same = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    first = max(same, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
    kind, message, param = first["type"], first["msg"], ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif (_FIELD.fullmatch(part) and part not in _TYPES) or not param:
            param += f".{part}" if param else part
    if kind == "json_invalid" and not param:
        return invalid(f"We could not parse the JSON body of your request: {message}", code=None)
    if kind == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {param}", code=None)
    named = param or None
    if kind == "missing":
        return invalid(f"Missing required parameter: '{param}'.", named, "missing_required_parameter")
    if kind == "unsupported_value":
        message = f"Unsupported value: '{param}' does not support this value with this model."
        return invalid(message, named, kind)
    if kind.endswith("_type"):
        return invalid(f"Invalid type for '{param}': {message}.", named, "invalid_type")
    return invalid(f"Invalid value for '{param}': {message}.", named)


def api_error(error: Exception, scope: Scope) -> ApiError:
    """The response for an error of a request; 500 for a bug, which is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return overloaded("The engine is overloaded; please try again later.")
    if isinstance(error, Closed):
        return stopping()
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, "The request timed out.", kind="server_error", code="timeout")
    if is_full(error):
        log.error("the volume is full: %s", error)
        message = "The server's volume is full: nothing was stored, and what was stored before is unchanged."
        return ApiError(507, message, kind="server_error", code="insufficient_storage")
    if isinstance(error, PromptTooLong):
        param = "prompt" if api_path(scope) == "/v1/completions" else "messages"
        return invalid(str(error), param, "context_length_exceeded")
    if isinstance(error, GenerationNotSupported):
        return invalid(str(error), code="unsupported_parameter")
    if isinstance(error, ValueError | TypeError | TemplateError):
        return invalid(str(error) or type(error).__name__, code=None)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "The server had an error while processing your request.", kind="server_error")


def response(error: ApiError, scope: Scope) -> JSONResponse:
    """The response of an error: for ``/v1beta`` in Google's form, else in OpenAI's."""
    google = (api_path(scope) or "").startswith("/v1beta")
    return JSONResponse(error.google_body() if google else error.body(), error.status, error.headers)


def add_handlers(app: FastAPI) -> None:
    """Answer every error of the application's routes as :func:`response`."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            known = {404: "Invalid URL", 405: "Not allowed to use this method"}
            what = known.get(error.status_code, str(error.detail))
            error = ApiError(error.status_code, f"{what} ({request.method} {request.url.path})")
        return response(api_error(error, request.scope), request.scope)

    kinds = (HTTPException, ApiError, QueueFull, Closed, DeadlineExceeded, PromptTooLong, OSError)
    for kind in (*kinds, GenerationNotSupported, ValueError, TypeError, TemplateError, Exception):
        app.add_exception_handler(kind, handle)
