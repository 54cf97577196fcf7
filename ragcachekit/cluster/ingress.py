"""The deployment that reads requests and passes each on to the replica that the router chooses."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ragcachekit.engine.request import to_thread
from ragcachekit.prompt.parser import PromptParser
from ragcachekit.server.contexts import NAME
from ragcachekit.server.errors import ApiError, overloaded
from ragcachekit.server.keys import ApiKeys
from ragcachekit.server.middleware import BodyLimit, disconnected
from ragcachekit.server.responses import api_path, response
from ragcachekit.types import chunk_id

HEADER = "x-ragcachekit-chunks"
"""Header with chunk ids and commas between them, for clients that know them."""

MAX_CHUNKS = 256
"""Chunks of a request by which it is routed."""

log = logging.getLogger(__name__)

_MAX_ID = 128  # characters
_USUAL_TOKENS = 200  # of a chunk that is known by its id alone
_FIELDS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)

Namespace = Callable[[Mapping[str, str], Mapping[str, Any]], str]
"""Gives a request's namespace from its headers, by lower-case names, and the fields of its body."""


class ChunkReader:
    """Reads chunk ids and token counts from requests of the server's API, without a model.

    Chunks are ``documents``, content parts with ``cache_control`` or ``prompt_cache_breakpoint``,
    ``chunk_ids``, and the ids in the header ``X-RagCacheKit-Chunks``. The name in ``cached_content`` counts
    as a chunk, and is the only one with a slash. A request that cannot be read has none: the server will
    refuse it.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        The model's.
    namespace : callable
        As :data:`Namespace`; its errors count as no chunks.
    """

    def __init__(self, tokenizer: Any, namespace: Namespace) -> None:
        self._parser, self._namespace = PromptParser(tokenizer), namespace

    def chunks(self, headers: Mapping[str, str], body: bytes) -> dict[str, int]:
        """Ids of the request's chunks, with their tokens."""
        found = dict.fromkeys(_ids(headers.get(HEADER, "").split(",")), _USUAL_TOKENS)
        try:
            fields = json.loads(body) if body else {}
            if isinstance(fields, dict):
                found |= dict.fromkeys(_ids(fields.get("chunk_ids")), _USUAL_TOKENS)
                if NAME.fullmatch(name := fields.get("cached_content") or fields.get("cachedContent") or ""):
                    found[name] = _USUAL_TOKENS
                texts = list(_texts(fields))[:MAX_CHUNKS]
                namespace = self._namespace(headers, fields) if texts else ""
                for ids in map(self._parser.chunk_ids, texts):
                    found[chunk_id(ids, namespace)] = len(ids)
        except Exception:  # the server refuses what is wrong; here it is only routed
            log.debug("no chunks could be read from a request", exc_info=True)
        return dict(list(found.items())[:MAX_CHUNKS])


def _ids(found: object) -> Iterator[str]:
    """What can be an id in a list."""
    if isinstance(found, list):
        ids = (one.strip() for one in found if isinstance(one, str))
        yield from (one for one in ids if 0 < len(one) <= _MAX_ID and "/" not in one)


def _texts(fields: Mapping[str, Any]) -> Iterator[str]:
    """Texts of the documents and of the marked parts of messages."""
    for document in fields.get("documents") or ():
        if isinstance(document, str):
            yield document
        elif title := document.get("title"):
            yield f"{title}\n{document['text']}"
        else:
            yield document["text"]
    for message in fields.get("messages") or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("cache_control") or part.get("prompt_cache_breakpoint"):
                yield part["text"]


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
