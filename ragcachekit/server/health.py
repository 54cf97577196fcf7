"""Whether the server takes requests: /health, and a stop that lets running answers end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcachekit import RagCache
from ragcachekit.server.connection import api_path
from ragcachekit.server.errors import ApiError, stopping
from ragcachekit.server.responses import response

log = logging.getLogger(__name__)


class Activity:
    """How many requests of the API run, and whether new ones are refused."""

    def __init__(self) -> None:
        self.running, self.stopping = 0, False


class Gate:
    """ASGI middleware that counts the API's requests, names them, and refuses new ones while stopping.

    Requests whose clients take nothing for ``send_timeout`` seconds are ended.
    """

    def __init__(self, app: ASGIApp, activity: Activity, retry_after: float, send_timeout: float) -> None:
        self._app, self._activity, self._retry_after = app, activity, retry_after
        self._send_timeout = send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if api_path(scope) is None:
            await self._app(scope, receive, send)
            return
        if self._activity.stopping:
            await response(stopping(self._retry_after), scope)(scope, receive, send)
            return
        name = f"req_{uuid4().hex}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
            try:
                async with asyncio.timeout(self._send_timeout):
                    await send(message)
            except TimeoutError:
                raise _Stalled from None

        self._activity.running += 1
        try:
            await self._app(scope, receive, named)
        except _Stalled:
            log.warning("%s: its client read nothing for %g s", name, self._send_timeout)
        finally:
            self._activity.running -= 1


class _Stalled(Exception):
    pass


def router(
    rag: RagCache,
    activity: Activity,
    allowed: Callable[[Request], bool],
    metrics: Callable[[], tuple[bytes, str]] | None,
) -> APIRouter:
    """``GET /health`` and ``/metrics``, whose numbers about all tenants only ``allowed`` requests get.

    Health: 200, 503 while the server stops. Metrics: 401 for others; no route without ``metrics``.
    """
    routes = APIRouter(include_in_schema=False)

    @routes.get("/health")
    async def health(request: Request) -> Response:
        found: dict[str, Any] = {"status": "stopping" if activity.stopping else "ok"}
        if allowed(request):
            found |= {"waiting": rag.queue.waiting, "running": rag.queue.running}
        return JSONResponse(found, 503 if activity.stopping else 200)

    if metrics is not None:

        @routes.get("/metrics")
        def measured(request: Request) -> Response:
            if not allowed(request):
                raise ApiError(401, "Metrics need an API key, or a client on the server's machine.")
            text, kind = metrics()
            return Response(text, media_type=kind)

    return routes
