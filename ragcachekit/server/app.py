"""The application: routes around one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request

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

log = logging.getLogger(__name__)


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
            if not await to_thread(rag.flush, config.flush_timeout):
                log.warning("background work was not done within %g s; it is dropped", config.flush_timeout)

    # Without the pages that would load scripts from elsewhere.
    app = FastAPI(title="RagCacheKit", lifespan=lifespan, openapi_url=None)
    app.state.activity = activity
    add_handlers(app, config.retry_after)

    def allowed(request: Request) -> bool:
        host = request.client.host if request.client else ""
        return config.public_metrics or keys.allows(host, request.headers)

    app.include_router(health.router(rag, activity, allowed, metrics))
    app.include_router(openai.router(services))
    app.include_router(contexts.router(services.contexts, services.usage, services.model_name))
    app.add_middleware(BodyLimit, config.max_body_bytes, keys.tenant)
    app.add_middleware(health.Gate, activity, config.retry_after, 4 * config.heartbeat)
    return app
