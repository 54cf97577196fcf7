"""The application around one engine, and the process that serves it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response

from ragcachekit import RagCache, to_thread
from ragcachekit.server import completions, context_routes
from ragcachekit.server.config import ServerConfig
from ragcachekit.server.contexts import ContextStore
from ragcachekit.server.errors import ApiError, add_handlers
from ragcachekit.server.keys import ApiKeys, Tenant, Usage
from ragcachekit.server.middleware import BodyLimit, Gate

log = logging.getLogger(__name__)

FLUSH_SECONDS = 30.0  # how long a stop waits for background work, as writes to disk


def create_app(
    rag: RagCache,
    config: ServerConfig | None = None,
    *,
    metrics: Callable[[], tuple[bytes, str]] | None = None,
) -> FastAPI:
    """The server's application around an engine with a tokenizer, for any ASGI server, in one process.

    ``metrics`` makes the text of ``/metrics``: ``PrometheusObserver(rag).render``. A stop waits for the
    engine's background work; the engine stays open.

    Raises ValueError for an engine without a tokenizer; RagCacheError for a file of keys, or a folder of
    contexts, that cannot be used.

    >>> app = create_app(RagCache.from_pretrained("path/or/hub-id"))  # doctest: +SKIP
    >>> uvicorn.run(app, port=8000)  # doctest: +SKIP
    """
    if rag.tokenizer is None:
        raise ValueError("the server needs a tokenizer; give one when making the RagCache")
    config = config or ServerConfig()
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
            if not await to_thread(rag.flush, FLUSH_SECONDS):
                log.warning("background work was not done within %g s and is dropped", FLUSH_SECONDS)

    # Without the pages that would load scripts from elsewhere.
    app = FastAPI(title="RagCacheKit", lifespan=lifespan, openapi_url=None)

    def may_see_all(request: Request) -> bool:
        return keys.allows(request.client.host if request.client else "", request.headers)

    @app.get("/health")
    async def health(request: Request) -> dict[str, Any]:
        numbers = {"waiting": rag.queue.waiting, "running": rag.queue.running}
        return {"status": "ok", **(numbers if may_see_all(request) else {})}

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
    app.add_middleware(Gate, 4 * config.heartbeat)
    return app


def serve(app: FastAPI, bound: socket.socket, timeout: float) -> None:
    """Serve an application at a bound socket until SIGTERM or SIGINT, which then ends the process.

    Answers that run may end before, within ``timeout`` seconds.
    """
    config = uvicorn.Config(
        app, log_level="warning", server_header=False, timeout_graceful_shutdown=int(timeout)
    )
    uvicorn.Server(config).run([bound])
