"""Chat and text completions, whole or streamed, and the list of models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ragcachekit.engine.request import AsyncAnswerStream
from ragcachekit.server.answers import cache_header, usage_of
from ragcachekit.server.completions import CompletionJob, Services, context_name
from ragcachekit.server.errors import ApiError
from ragcachekit.server.limits import Grant
from ragcachekit.server.middleware import CLIENT_GONE, while_connected
from ragcachekit.server.responses import api_error, parsed
from ragcachekit.server.schemas import ChatRequest, Completion, TextRequest

_HEARTBEAT = b": heartbeat\n\n"


def router(services: Services) -> APIRouter:
    """The routes of one application."""
    routes, created = APIRouter(prefix="/v1"), int(time.time())
    model = {"id": services.model_name, "object": "model", "created": created, "owned_by": "ragcachekit"}

    @routes.get("/models")
    async def models() -> Mapping[str, Any]:
        return {"object": "list", "data": [model]}

    @routes.get("/models/{name:path}")
    async def one_model(name: str) -> Mapping[str, Any]:
        if name != model["id"]:
            message = f"The model '{name}' does not exist"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await _complete(services, request, ChatRequest)

    @routes.post("/completions")
    async def text(request: Request) -> Response:
        return await _complete(services, request, TextRequest)

    return routes


async def _complete(services: Services, request: Request, kind: type[Completion]) -> Response:
    tenant, grant = request.state.tenant, request.state.grant
    body, context = await parsed(request, kind), None
    async with AsyncExitStack() as stack:
        if (name := context_name(body)) is not None:
            context = await stack.enter_async_context(services.contexts.using(tenant, name))
        job = CompletionJob(services, tenant, body, context)
        grant.expect(job.expected_tokens)
        if body.stream:
            streams = [await stack.enter_async_context(stream) for stream in job.streams()]
            wants_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            heartbeat = services.config.heartbeat
            return EventStream(job, streams, stack.pop_all(), grant, wants_usage, heartbeat, request.scope)
        answers = await while_connected(request.receive, job.answers())
        if answers is None:
            return Response(status_code=CLIENT_GONE)
        choices = [choice.whole(answer) for choice, answer in zip(job.choices, answers, strict=True)]
        grant.used(sum(a.report.link.prompt_tokens + a.report.output_tokens for a in answers))
        prompts = job.by_prompt(answers)
        return JSONResponse(job.form.whole(choices, usage_of(prompts)), headers=cache_header(prompts))


class EventStream(StreamingResponse):
    """The answers of ``streams``, which were entered, as server-sent events.

    ``stack`` is left in the end; the tokens that were computed are charged to ``grant``, however the stream
    ends. ``scope`` is the request's.
    """

    def __init__(
        self,
        job: CompletionJob,
        streams: list[AsyncAnswerStream],
        stack: AsyncExitStack,
        grant: Grant,
        wants_usage: bool,
        heartbeat: float,
        scope: Scope,
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), headers=headers, media_type="text/event-stream")
        self._job, self._streams, self._stack, self._grant = job, streams, stack, grant
        self._wants_usage, self._heartbeat, self._scope = wants_usage, heartbeat, scope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            try:
                await super().__call__(scope, receive, send)
            finally:
                self._grant.used(sum(stream.tokens for stream in self._streams))

    async def _events(self) -> AsyncIterator[bytes]:
        choices, queue = self._job.choices, asyncio.Queue[tuple[int, str | Exception | None]]()
        pumps = [asyncio.create_task(_pump(n, stream, queue)) for n, stream in enumerate(self._streams)]
        try:
            for choice in choices:
                if (event := choice.start()) is not None:
                    yield _data(event)
            going = len(pumps)
            while going:
                try:
                    async with asyncio.timeout(self._heartbeat):
                        number, piece = await queue.get()
                except TimeoutError:
                    yield _HEARTBEAT
                    continue
                if isinstance(piece, Exception):
                    raise piece
                if piece is None:
                    going -= 1
                    for event in choices[number].end(self._streams[number].answer):
                        yield _data(event)
                elif (event := choices[number].push(piece)) is not None:
                    yield _data(event)
            if self._wants_usage:
                answers = [stream.answer for stream in self._streams]
                yield _data(self._job.form.piece([], usage_of(self._job.by_prompt(answers))))
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield _data(api_error(error, self._scope).body())
        finally:
            for pump in pumps:
                pump.cancel()


async def _pump(
    number: int, stream: AsyncAnswerStream, queue: asyncio.Queue[tuple[int, str | Exception | None]]
) -> None:
    end: Exception | None = None
    try:
        async for piece in stream:
            queue.put_nowait((number, piece))
    except Exception as error:
        end = error
    queue.put_nowait((number, end))


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
