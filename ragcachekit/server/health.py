"""Whether the server takes requests: /health, and a stop that lets running answers end."""

from __future__ import annotations

from uuid import uuid4

from fastapi import APIRouter
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcachekit import RagCache
from ragcachekit.server.connection import api_path
from ragcachekit.server.errors import stopping
from ragcachekit.server.responses import response


class Activity:
    """How many requests of the API run, and whether new ones are refused."""

    def __init__(self) -> None:
        self.running, self.stopping = 0, False


class Gate:
    """ASGI middleware that counts the API's requests, names them, and refuses new ones while stopping."""

    def __init__(self, app: ASGIApp, activity: Activity, retry_after: float) -> None:
        self._app, self._activity, self._retry_after = app, activity, retry_after

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
            await send(message)

        self._activity.running += 1
        try:
            await self._app(scope, receive, named)
        finally:
            self._activity.running -= 1


def router(rag: RagCache, activity: Activity) -> APIRouter:
    """``GET /health``: 200 with the queue's length, 503 while the server stops."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        status = "stopping" if activity.stopping else "ok"
        counts = {"status": status, "waiting": rag.queue.waiting, "running": rag.queue.running}
        return JSONResponse(counts, 503 if activity.stopping else 200)

    return routes
