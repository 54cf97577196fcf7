"""The application for Ray Serve: ``serve run ragcachekit.cluster.app:build_app model=...``."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Receive, Scope, Send
from transformers import AutoTokenizer

from ragcachekit.cluster.router import routing_stats
from ragcachekit.cluster.shared_tier import KEY, shared_tier
from ragcachekit.config import StoreConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.engine.request import to_thread
from ragcachekit.prompt.parser import PromptParser
from ragcachekit.server import ServerConfig, create_app
from ragcachekit.server.contexts import NAME
from ragcachekit.server.errors import ApiError, api_path, overloaded, response
from ragcachekit.server.keys import ApiKeys, Tenant
from ragcachekit.server.messages import MessagesRequest
from ragcachekit.server.middleware import BodyLimit, disconnected
from ragcachekit.server.schemas import ChatRequest, Completion, ResponsesRequest, TextRequest, document_text
from ragcachekit.types import DEFAULT_ENCODER, DEFAULT_POLICY, chunk_id

log = logging.getLogger(__name__)

MAX_CHUNKS = 256
"""Chunks of a request by which it is routed."""

_USUAL_TOKENS = 200  # of a chunk that is known by its id alone
_BODIES: dict[str, type[Completion | MessagesRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": TextRequest,
    "/v1/messages": MessagesRequest,
    "/v1/responses": ResponsesRequest,
}
_FIELDS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)
_MAX_CONTEXTS = 4096  # names that a replica remembers


class AppSettings(BaseModel):
    """What :func:`build_app` serves.

    - ``model``: Folder or hub id, the same on every machine; ``model_name`` is what clients call it.
    - ``replicas``, ``ingresses``: Engines, and processes that read and route requests.
    - ``shared``, ``shared_key``: Url of a tier that the engines share, and the environment variable with the
      key that signs its entries.
    - ``host_gb``: Memory tier of each engine.
    - ``keys``, ``contexts``: File of API keys and folder of contexts, as for
      :class:`~ragcachekit.server.ServerConfig`; all machines must see them. Without ``contexts``, several
      replicas have none.
    - ``policy``, ``encoder``: As for :class:`ragcachekit.RagCache`. ``auto`` would choose for each replica
      alone, which then could not read each other's entries.
    - ``cpus``, ``gpus``: Of each engine.
    - ``max_ongoing``: Requests that an engine takes at once; further ones wait in the ingress.
    - ``publish_seconds``: How often replicas report what they hold.
    - ``router``, ``router_options``: Ray's request router, and its arguments; ours has none.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    model_name: str | None = None
    replicas: int = Field(default=2, ge=1)
    ingresses: int = Field(default=1, ge=1)
    shared: str | None = None
    shared_key: str = KEY
    host_gb: float = Field(default=4.0, gt=0)
    policy: str = DEFAULT_POLICY
    encoder: str | None = DEFAULT_ENCODER
    namespace: str = "default"
    keys: Path | None = None
    contexts: Path | None = None
    dtype: str = "auto"
    cpus: float = Field(default=1.0, ge=0)
    gpus: float = Field(default=0.0, ge=0)
    max_ongoing: int = Field(default=64, ge=1)
    publish_seconds: float = Field(default=2.0, gt=0)
    router: str = "ragcachekit.cluster.router:ChunkRouter"
    router_options: dict[str, float] = {}

    @property
    def has_contexts(self) -> bool:
        """Whether every replica finds the contexts."""
        return self.contexts is not None or self.replicas == 1


def build_app(settings: AppSettings | dict[str, Any]) -> serve.Application:
    """The deployments of one model, for ``serve run``, ``serve.run`` and config files.

    ValueError for settings that are unknown, missing or out of range.

    >>> serve.run(build_app(AppSettings(model="path/or/hub-id")))  # doctest: +SKIP
    """
    settings = AppSettings.model_validate(settings)
    replicas = serve.deployment(
        name="replicas",
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_ongoing,
        graceful_shutdown_timeout_s=60.0,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        request_router_config={
            "request_router_class": settings.router,
            "request_router_kwargs": settings.router_options,
            "request_routing_stats_period_s": settings.publish_seconds,
        },
    )(Replica)
    ingress = serve.deployment(
        name="ingress",
        num_replicas=settings.ingresses,
        max_ongoing_requests=4 * settings.max_ongoing * settings.replicas,
        ray_actor_options={"num_cpus": 0.1},
    )(Ingress)
    engines = replicas.bind(partial(open_replica, settings))
    body = ServerConfig().max_body_bytes
    return ingress.bind(engines, partial(open_reader, settings), body, settings.has_contexts)


def open_replica(settings: AppSettings) -> tuple[RagCache, FastAPI]:
    """An engine and the server's application around it."""
    host = int(settings.host_gb * 1e9)
    store = StoreConfig(host_bytes=host)
    if settings.shared is not None:
        store = shared_tier(settings.shared, settings.shared_key, host_bytes=host)
    rag = RagCache.from_pretrained(
        settings.model,
        policy=settings.policy,
        encoder=settings.encoder,
        namespace=settings.namespace,
        store=store,
        dtype=settings.dtype,
    )
    config = ServerConfig(model_name=settings.model_name, keys=settings.keys, contexts=settings.contexts)
    return rag, create_app(rag, config)


def open_reader(settings: AppSettings) -> tuple[ChunkReader, ApiKeys]:
    """The reader of requests' chunks, with the model's tokenizer alone, and the API keys."""
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
    return ChunkReader(tokenizer), ApiKeys(settings.keys, Tenant("open", settings.namespace))


class Replica:
    """One engine and the server's application around it.

    ``open`` is called once, in the replica's process.
    """

    async def __init__(self, open: Callable[[], tuple[RagCache, FastAPI]]) -> None:  # type: ignore[misc]
        self._rag, self._app = await to_thread(open)
        self._names, self._answered = deque[str](maxlen=_MAX_CONTEXTS), 0
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()  # the process ends with it

    async def answer(self, scope: Scope, body: bytes, chunks: Mapping[str, int]) -> AsyncIterator[Message]:
        """Run one HTTP request through the application; yields its ASGI messages.

        Closing it early, as when the client goes away, disconnects the request.
        """
        self._answered += 1
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        bodies = iter([body])

        async def receive() -> Message:
            for content in bodies:
                return {"type": "http.request", "body": content, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app({**scope, "app": self._app}, receive, sent.put)
            finally:
                sent.put_nowait(None)

        task = asyncio.ensure_future(run())
        try:
            while (message := await sent.get()) is not None:
                if 200 <= message.get("status", 0) < 300:
                    self._names += filter(NAME.fullmatch, chunks)  # the engine has only their chunks
                yield message
            await task
        finally:
            gone.set()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def record_routing_stats(self) -> dict[str, Any]:
        """What the replica holds, for the router, and how many requests it has had; Serve calls this."""
        held = routing_stats([*self._rag.chunks_in_memory(), *{*self._names}])
        return {**held, "answered": self._answered}

    def __del__(self) -> None:
        """Write what is to be kept, and close the engine; Serve calls this after the last answer."""
        if (rag := self.__dict__.pop("_rag", None)) is not None:
            rag.flush()
            rag.close()


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
            asked = kind.model_validate_json(body)
            fields = asked.as_chat() if isinstance(asked, MessagesRequest) else asked
        except (ValidationError, ApiError):
            return {}
        named = [*fields.chunk_ids, *([fields.cached_content] if fields.cached_content else [])]
        texts = list(map(document_text, fields.documents))
        if isinstance(fields, ChatRequest):
            parts = [part for m in fields.messages for part in m.content or () if not isinstance(part, str)]
            texts += [part.text for part in parts if part.is_chunk]
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
            refused = overloaded("The replica failed; please try again.")
            await response(refused, scope)(scope, receive, send)
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone
