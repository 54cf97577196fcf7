"""The application: routes around one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.responses import Response

from ragcachekit import RagCache
from ragcachekit.engine.asyncio_api import to_thread
from ragcachekit.server import health
from ragcachekit.server.config import ServerConfig
from ragcachekit.server.openai import routes as openai
from ragcachekit.server.responses import add_handlers
from ragcachekit.server.services import NoContexts, NoLimits, OneTenant, Services


def create_app(rag: RagCache, config: ServerConfig | None = None) -> FastAPI:
    """The server's application around an engine, for any ASGI server.

    Parameters
    ----------
    rag : RagCache
        With a tokenizer. When the application stops, its background work is waited for; it is not closed.
    config : ServerConfig, optional

    Raises
    ------
    ValueError
        For an engine without a tokenizer.

    Examples
    --------
    >>> app = create_app(RagCache.from_pretrained("path/or/hub-id"))  # doctest: +SKIP
    >>> uvicorn.run(app, port=8000)  # doctest: +SKIP
    """
    config = config or ServerConfig()
    return build(Services(rag, config, OneTenant(rag.namespace), NoLimits(), NoContexts()))


def build(services: Services) -> FastAPI:
    """The application out of its parts."""
    rag, config, activity = services.rag, services.config, health.Activity()
    if rag.tokenizer is None:
        raise ValueError("the server needs a tokenizer; give one when making the RagCache")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await to_thread(rag.flush)

    # Without the pages that would load scripts from elsewhere.
    app = FastAPI(title="RagCacheKit", lifespan=lifespan, openapi_url=None)
    app.state.activity = activity
    add_handlers(app, config.retry_after)
    app.include_router(health.router(rag, activity))
    app.include_router(openai.router(services))
    if (render := services.metrics) is not None:

        @app.get("/metrics")
        async def metrics() -> Response:
            text, kind = await to_thread(render)
            return Response(text, media_type=kind)

    app.add_middleware(health.Gate, activity, config.retry_after)
    return app
