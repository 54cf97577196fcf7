"""The application: routes around one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.responses import Response

from ragcachekit import RagCache, to_thread
from ragcachekit.server import health
from ragcachekit.server.body_limit import BodyLimit
from ragcachekit.server.config import ServerConfig
from ragcachekit.server.contexts import routes as contexts
from ragcachekit.server.contexts.store import ContextStore
from ragcachekit.server.keys import ApiKeys
from ragcachekit.server.openai import routes as openai
from ragcachekit.server.responses import add_handlers
from ragcachekit.server.services import Services
from ragcachekit.server.tenants import Tenant


def create_app(
    rag: RagCache,
    config: ServerConfig | None = None,
    *,
    metrics: Callable[[], tuple[bytes, str]] | None = None,
) -> FastAPI:
    """The server's application around an engine, for any ASGI server, in one process.

    Parameters
    ----------
    rag : RagCache
        With a tokenizer. When the application stops, its background work is waited for; it is not closed.
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
    config, activity = config or ServerConfig(), health.Activity()
    keys = ApiKeys(config.keys, Tenant("open", rag.namespace))
    services = Services(rag, config, ContextStore(rag, config.contexts, timeout=config.timeout))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        expiry = asyncio.create_task(services.contexts.run())
        try:
            yield
        finally:
            expiry.cancel()
            await asyncio.wait((expiry,))
            await to_thread(rag.flush)

    # Without the pages that would load scripts from elsewhere.
    app = FastAPI(title="RagCacheKit", lifespan=lifespan, openapi_url=None)
    app.state.activity = activity
    add_handlers(app, config.retry_after)
    app.include_router(health.router(rag, activity))
    app.include_router(openai.router(services))
    app.include_router(contexts.router(services.contexts, services.usage, services.model_name))
    if metrics is not None:
        app.add_api_route("/metrics", lambda: _metrics(*metrics()), include_in_schema=False)
    app.add_middleware(BodyLimit, config.max_body_bytes, keys.tenant)
    app.add_middleware(health.Gate, activity, config.retry_after)
    return app


def _metrics(text: bytes, kind: str) -> Response:
    return Response(text, media_type=kind)
