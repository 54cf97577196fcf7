"""The deployment that reads requests and passes each on to the replica that the router chooses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ragcachekit.cluster.chunk_reader import ChunkReader
from ragcachekit.engine.asyncio_api import to_thread
from ragcachekit.server.body_limit import BodyLimit
from ragcachekit.server.connection import api_path
from ragcachekit.server.errors import ApiError, overloaded
from ragcachekit.server.keys import ApiKeys
from ragcachekit.server.responses import response

log = logging.getLogger(__name__)

_FIELDS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)


class Front:
    """The ASGI application of an :class:`Ingress`; a function would be taken for one that makes it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an HTTP request to the ingress of this process."""
        if scope["type"] == "http":
            ingress: Any = serve.get_replica_context().servable_object
            await ingress.answer(scope, receive, send)


@serve.ingress(Front())
class Ingress:
    """Authenticates requests, reads the chunks of each, and passes it on.

    Parameters
    ----------
    replicas : DeploymentHandle
        Of :class:`~ragcachekit.cluster.replica.Replica`.
    open : callable
        Opens the reader of chunks and the API keys in the ingress's process.
    max_body_bytes : int
        Larger bodies are refused with 413.
    has_contexts : bool
        Whether every replica finds the contexts; else their routes answer 501.
    """

    def __init__(
        self,
        replicas: DeploymentHandle[Any],
        open: Callable[[], tuple[ChunkReader, ApiKeys]],
        max_body_bytes: int,
        has_contexts: bool,
    ) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._reader, keys = open()
        self._has_contexts = has_contexts
        self.answer = BodyLimit(self._forward, max_body_bytes, keys.tenant)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the replica's response as it comes; a client that goes away cancels its request."""
        body, path = b"", api_path(scope)
        if path is not None:  # where the body is bounded
            body = (await receive()).get("body", b"")
        if path is not None and path.startswith("/v1beta") and not self._has_contexts:
            refused = ApiError(501, "Cached contents need a folder that all replicas see: 'contexts'.")
            return await JSONResponse(refused.google_body(), refused.status)(scope, receive, send)
        chunks = await to_thread(self._reader.chunks, Headers(scope=scope), body)
        fields = {name: scope[name] for name in _FIELDS if name in scope}
        messages: Any = self._replicas.remote(fields, body, chunks=chunks)
        gone = asyncio.ensure_future(_gone(receive))
        gone.add_done_callback(lambda task: None if task.cancelled() else messages.cancel())
        started = False
        try:
            async for message in messages:
                started = True
                await send(message)
        except RequestCancelledError:
            if not gone.done():
                raise
        except (RayError, RayServeException) as error:
            log.error("a replica failed", exc_info=error)
            if started:
                raise
            await response(overloaded("The engine is gone; please try again.", 1.0), scope)(
                scope, receive, send
            )
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
