"""The deployment that reads requests and passes each on to the replica that the router chooses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.types import Receive, Scope, Send

from ragcachekit.engine.asyncio_api import to_thread
from ragcachekit.prompt.parser import PromptParser
from ragcachekit.server.errors import ApiError, api_path, overloaded, response
from ragcachekit.server.keys import ApiKeys, Tenant
from ragcachekit.server.middleware import BodyLimit, disconnected
from ragcachekit.server.schemas import ChatRequest, Completion, TextPart, TextRequest, document_text
from ragcachekit.types import chunk_id

MAX_CHUNKS = 256
"""Chunks of a request by which it is routed."""

log = logging.getLogger(__name__)

_USUAL_TOKENS = 200  # of a chunk that is known by its id alone
_BODIES: dict[str, type[Completion]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": TextRequest}
_FIELDS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)


class ChunkReader:
    """Reads chunk ids and token counts from requests of the server's API, with the model's tokenizer alone.

    Chunks are ``documents``, content parts that are marked, and ``chunk_ids``; the name in ``cached_content``
    counts as one. A request that cannot be read has none: the server will refuse it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._parser = PromptParser(tokenizer)

    def chunks(self, tenant: Tenant, path: str, body: bytes) -> dict[str, int]:
        """Ids of the request's chunks, with their tokens."""
        if (kind := _BODIES.get(path)) is None:
            return {}
        try:
            fields = kind.model_validate_json(body)
        except ValidationError:
            return {}
        named = [*fields.chunk_ids, *([fields.cached_content] if fields.cached_content else [])]
        texts = list(map(document_text, fields.documents))
        if isinstance(fields, ChatRequest):
            parts = [
                part
                for message in fields.messages
                for part in message.content or ()
                if not isinstance(part, str)
            ]
            texts += [part.text for part in parts if isinstance(part, TextPart) and part.is_chunk]
        namespace = tenant.partition(fields.cache_salt, fields.prompt_cache_key)
        found = dict.fromkeys(named[:MAX_CHUNKS], _USUAL_TOKENS)
        for ids in map(self._parser.chunk_ids, texts[: MAX_CHUNKS - len(found)]):
            found[chunk_id(ids, namespace)] = len(ids)
        return found


class Front:
    """The ASGI application of an :class:`Ingress`; a function would be taken for one that makes it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an HTTP request to the ingress of this process."""
        if scope["type"] == "http":
            ingress: Any = serve.get_replica_context().servable_object
            await ingress.answer(scope, receive, send)


@serve.ingress(Front())
class Ingress:
    """Authenticates requests, reads the chunks of each, and passes it on to one of the ``replicas``.

    ``open`` opens the reader of chunks and the API keys in the ingress's process. Unless ``has_contexts``
    (every replica finds them), the routes of contexts answer 501.
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
        chunks, body = dict[str, int](), b""
        if (path := api_path(scope)) is not None:  # of which the body is bounded, and the tenant known
            body = (await receive()).get("body", b"")
            if path.startswith("/v1beta") and not self._has_contexts:
                refused = ApiError(501, "Cached contents need a folder that all replicas see: 'contexts'.")
                return await response(refused, scope)(scope, receive, send)
            chunks = await to_thread(self._reader.chunks, scope["state"]["tenant"], path, body)
        fields = {name: scope[name] for name in _FIELDS if name in scope}
        messages: Any = self._replicas.remote(fields, body, chunks=chunks)
        gone = asyncio.ensure_future(disconnected(receive))
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
            refused = overloaded("The engine is gone; please try again.")
            await response(refused, scope)(scope, receive, send)
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone
