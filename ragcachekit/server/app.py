"""The application around one engine, and the process that serves it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from ragcachekit import RagCache, to_thread
from ragcachekit.server import completions, context_routes
from ragcachekit.server.config import ServerConfig
from ragcachekit.server.contexts import ContextStore
from ragcachekit.server.errors import ApiError, add_handlers
from ragcachekit.server.keys import ApiKeys, Tenant, Usage
from ragcachekit.server.middleware import Activity, BodyLimit, Gate

log = logging.getLogger(__name__)

LINGER_SECONDS = 10
"""How long a stop waits for clients to take the rest of answers that have ended."""

SAME_SIGNAL_SECONDS = 1.0
"""A signal this soon after the first is the same one: wrappers signal the group and forward it, too."""

Metrics = Callable[[], tuple[bytes, str]]
"""Makes the text of ``/metrics`` and its content type."""


def create_app(
    rag: RagCache, config: ServerConfig | None = None, *, metrics: Metrics | None = None
) -> FastAPI:
    """The server's application around an engine, for any ASGI server, in one process.

    Parameters
    ----------
    rag : RagCache
        With a tokenizer. When the application stops, it waits for the engine's background work; the engine
        stays open.
    config : ServerConfig, optional
    metrics : callable, optional
        Makes the text of ``/metrics`` and its content type: ``PrometheusObserver(rag).render``.

    Raises
    ------
    ValueError
        For an engine without a tokenizer.
    RagCacheError
        For a file of keys, or a folder of contexts, that cannot be used.

    Examples
    --------
    >>> app = create_app(RagCache.from_pretrained("path/or/hub-id"))  # doctest: +SKIP
    >>> uvicorn.run(app, port=8000)  # doctest: +SKIP
    """
    if rag.tokenizer is None:
        raise ValueError("the server needs a tokenizer; give one when making the RagCache")
    config, activity = config or ServerConfig(), Activity()
    keys = ApiKeys(config.keys, Tenant("open", rag.namespace))
    model = completions.ServedModel(rag, config)
    contexts = ContextStore(rag, config.contexts, timeout=config.timeout)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeps = asyncio.create_task(contexts.run())
        try:
            yield
        finally:
            sweeps.cancel()
            await asyncio.wait((sweeps,))
            if not await to_thread(rag.flush, config.flush_timeout):
                log.warning("background work was not done within %g s; it is dropped", config.flush_timeout)

    # Without the pages that would load scripts from elsewhere.
    app = FastAPI(title="RagCacheKit", lifespan=lifespan, openapi_url=None)
    app.state.activity = activity

    def may_see_all(request: Request) -> bool:
        """Whether a request may see numbers about all tenants."""
        host = request.client.host if request.client else ""
        return config.public_metrics or keys.allows(host, request.headers)

    @app.get("/health")
    async def health(request: Request) -> Response:
        found: dict[str, Any] = {"status": "stopping" if activity.stopping else "ok"}
        if may_see_all(request):
            found |= {"waiting": rag.queue.waiting, "running": rag.queue.running}
        return JSONResponse(found, 503 if activity.stopping else 200)

    if metrics is not None:

        @app.get("/metrics")
        def measured(request: Request) -> Response:
            if not may_see_all(request):
                raise ApiError(401, "Metrics need an API key, or a client on the server's machine.")
            text, kind = metrics()
            return Response(text, media_type=kind)

    add_handlers(app)
    app.include_router(completions.router(model, contexts))
    app.include_router(context_routes.router(contexts, model.name))
    app.add_middleware(BodyLimit, config.max_body_bytes, keys.tenant, Usage())
    app.add_middleware(Gate, activity, 4 * config.heartbeat)
    return app


class GracefulServer(uvicorn.Server):
    """After SIGTERM or SIGINT it refuses new requests with 503, and exits with 0 once none runs any more.

    A second signal, a second later or more, ends it at once.
    """

    def __init__(self, config: uvicorn.Config, activity: Activity) -> None:
        super().__init__(config)
        self._activity, self._stopped_at = activity, 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to stop."""
        now = time.monotonic()
        if not self._activity.stopping:
            self._activity.stopping, self._stopped_at = True, now
        elif now - self._stopped_at >= SAME_SIGNAL_SECONDS:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    async def on_tick(self, counter: int) -> bool:
        """Whether to exit; called every tenth of a second."""
        idle = self._activity.stopping and not self._activity.running
        return idle or await super().on_tick(counter)


def serve(app: FastAPI, bound: socket.socket) -> None:
    """Serve an application of :func:`create_app` at a bound socket until a signal comes; blocks."""
    config = uvicorn.Config(
        app, log_level="warning", server_header=False, timeout_graceful_shutdown=LINGER_SECONDS
    )
    GracefulServer(config, app.state.activity).run([bound])
