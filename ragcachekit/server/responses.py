"""Errors as responses."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from ragcachekit.errors import Closed, DeadlineExceeded, GenerationNotSupported, PromptTooLong, QueueFull
from ragcachekit.server.connection import api_path
from ragcachekit.server.errors import ApiError, overloaded, stopping
from ragcachekit.store.disk import is_full

log = logging.getLogger(__name__)


def api_error(error: Exception, retry_after: float, scope: Scope) -> ApiError:
    """The response for an error of a request; 500 for a bug, which is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return overloaded("The engine is overloaded; please try again later.", retry_after)
    if isinstance(error, Closed):
        return stopping(retry_after)
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, "The request timed out.", kind="server_error", code="timeout")
    if is_full(error):
        log.error("the volume is full: %s", error)
        message = "The server's volume is full: nothing was stored, and what was stored before is unchanged."
        return ApiError(507, message, kind="server_error", code="insufficient_storage")
    if isinstance(error, PromptTooLong):
        param = "prompt" if api_path(scope) == "/v1/completions" else "messages"
        return ApiError(400, str(error), param=param, code="context_length_exceeded")
    if isinstance(error, GenerationNotSupported):
        return ApiError(400, str(error), code="unsupported_parameter")
    if isinstance(error, ValueError | TypeError | TemplateError):
        return ApiError(400, str(error) or type(error).__name__)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "The server had an error while processing your request.", kind="server_error")


def response(error: ApiError, scope: Scope) -> JSONResponse:
    """The response of an error: in Google's form to requests of ``/v1beta``, to others in OpenAI's."""
    google = (api_path(scope) or "").startswith("/v1beta")
    return JSONResponse(error.google_body() if google else error.body(), error.status, error.headers)


def add_handlers(app: FastAPI, retry_after: float) -> None:
    """Answer every error of the application's routes as :func:`response`."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            known = {404: "Invalid URL", 405: "Not allowed to use this method"}
            what = known.get(error.status_code, str(error.detail))
            error = ApiError(error.status_code, f"{what} ({request.method} {request.url.path})")
        return response(api_error(error, retry_after, request.scope), request.scope)

    kinds = (HTTPException, ApiError, QueueFull, Closed, DeadlineExceeded, PromptTooLong, OSError)
    for kind in (*kinds, GenerationNotSupported, ValueError, TypeError, TemplateError, Exception):
        app.add_exception_handler(kind, handle)
